# SPDX-License-Identifier: Apache-2.0
"""SIGKILL leaves no time to clean up. What is on disk must be enough."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import killed_fit
import pytest
import torch
from resuming import ALGORITHMS, assert_equal

import fl_lightning as fl

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")


def kill(folder, algorithm, where):
    """Runs a fit in another process until it is in the chosen place, and kills it there."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), *sys.path]), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, HERE / "killed_fit.py", folder, algorithm, where], env=environment, cwd=folder,
        stdout=subprocess.DEVNULL, stderr=(folder / "errors").open("wb"),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while not (folder / "ready").exists():
            assert process.poll() is None, (folder / "errors").read_text()
            assert time.monotonic() < deadline, "the fit did not get there"
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL


def check(folder, algorithm, where):
    kill(folder, algorithm, where)
    files, rounds = folder / "files", killed_fit.ROUND
    # Under its own name every file is whole.
    for file in files.glob("*.ckpt"):
        torch.load(file, weights_only=True)
    halves = [file.name for file in files.glob("*.part")]
    assert len(halves) == (where == "while saving")
    # A half file under the name of a whole one, as another program might leave it, is passed over.
    newest = max(files.glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)
    (files / "zz.ckpt").write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    with pytest.warns(UserWarning, match=r"skipping checkpoint .*zz\.ckpt: it does not load"):
        found = fl.newest_checkpoint(files)
    assert found == newest
    (files / "zz.ckpt").unlink()

    per_client = where == "in a round, saved per client"
    last = torch.load(found, weights_only=True)
    place = last["loops"]["fit_loop"]["epoch_loop.state_dict"]["federated"]["place"]
    assert (last["epoch"], place) == ((rounds, "round") if per_client else (rounds - 1, "epoch_end"))
    project = killed_fit.project(algorithm, per_client)
    whole = project.fit(folder / "whole")
    resumed = project.fit(files, ckpt_path=found)
    assert_equal(resumed, whole, len(whole.rows) - len(resumed.rows))
    assert {row["epoch"] for _, row in resumed.rows} == {2, 3}
    assert not list(files.glob("*.part"))  # written anew and renamed


@pytest.mark.parametrize("where", ["in a round", "while saving"])
def test_killed(tmp_path, where):
    check(tmp_path, "FedLF", where)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in a round", "in a round, saved per client", "while saving"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_killed(tmp_path, algorithm, where):
    check(tmp_path, algorithm, where)
