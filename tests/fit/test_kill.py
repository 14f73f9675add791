# SPDX-License-Identifier: Apache-2.0
"""SIGKILL leaves no time to clean up. What is on disk must be enough."""

import multiprocessing
import signal
import time
import warnings

import killed_fit
import pytest
import torch
from resuming import assert_equal, differences

import fl_lightning as fl

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
CONTEXT = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
"""A copy of this process has everything imported already; one that may have used a GPU cannot be copied."""


def kill(folder, algorithm, where):
    """Runs a fit in another process until it is in the chosen place, and kills it there."""
    process = CONTEXT.Process(target=killed_fit.fit, args=(folder, algorithm, where))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of processes with threads: xdist's do not run in the copy
        process.start()
    try:
        deadline = time.monotonic() + 300
        while not (folder / "ready").exists():
            assert process.is_alive(), "it says why"
            assert time.monotonic() < deadline, "the fit did not get there"
            time.sleep(0.02)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL


def personal(outcome):
    """The clients' models in files."""
    own = getattr(outcome.strategy.client_rule, "own", {})
    return [(own.get(client).params, own.get(client).buffers) for client in range(6) if own.get(client) is not None]


# With state of the server, by client, of clients; while a checkpoint and while a personal model is written.
@pytest.mark.parametrize(
    ("algorithm", "where"),
    [("AFL", "in a round"), ("SCAFFOLD", "in a round"), ("MOON", "in a round"), ("FedLF", "saving"), ("Ditto", "own")],
)
def test_a_killed_fit_goes_on(tmp_path, algorithm, where):
    kill(tmp_path, algorithm, where)
    files = tmp_path / "files"
    # Under its own name every file is whole.
    for file in [*files.glob("*.ckpt"), *tmp_path.rglob("*.pt")]:
        torch.load(file, weights_only=True)
    assert len(list(tmp_path.rglob("*.part"))) == (where != "in a round")
    # A half file under the name of a whole one, as another program might leave it, is passed over.
    newest = max(files.glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)
    (files / "zz.ckpt").write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    with pytest.warns(UserWarning, match=r"skipping checkpoint .*zz\.ckpt: it does not load"):
        found = fl.newest_checkpoint(files)
    assert found == newest
    (files / "zz.ckpt").unlink()
    assert torch.load(found, weights_only=True)["epoch"] == killed_fit.ROUND - 1

    whole = killed_fit.project(tmp_path / "other", algorithm).fit(tmp_path / "whole")
    resumed = killed_fit.project(tmp_path, algorithm).fit(files, ckpt_path=found)
    assert_equal(resumed, whole)
    assert not differences(personal(resumed), personal(whole))
    assert (len(personal(resumed)) > 2) == (algorithm == "Ditto")
    assert {row["epoch"] for _, row in resumed.rows} == {2, 3}
    assert not list(tmp_path.rglob("*.part"))  # written anew and renamed
