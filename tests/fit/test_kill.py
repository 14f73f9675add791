# SPDX-License-Identifier: Apache-2.0
"""SIGKILL leaves no time to clean up. What is on disk must be enough."""

import multiprocessing
import signal
import time
import warnings

import killed_files
import killed_fit
import pytest
import torch
from resuming import ALGORITHMS, assert_equal
from support import weights

import fl_lightning as fl

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")


CONTEXT = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
"""A copy of this process has everything imported already; one that may have used a GPU cannot be copied."""


def started(program, *arguments):
    process = CONTEXT.Process(target=program, args=arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of processes with threads: xdist's do not run in the copy
        process.start()
    return process


def kill(folder, algorithm, where):
    """Runs a fit in another process until it is in the chosen place, and kills it there."""
    process = started(killed_fit.fit, folder, algorithm, where)
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
    closed = last["loops"]["fit_loop"]["epoch_loop.state_dict"]["federated"]["closed"]
    assert (last["epoch"], closed) == ((rounds, False) if per_client else (rounds - 1, True))
    project = killed_fit.project(algorithm, per_client)
    whole = project.fit(folder / "whole")
    resumed = project.fit(files, ckpt_path=found)
    assert_equal(resumed, whole)
    assert {row["epoch"] for _, row in resumed.rows} == {2, 3}
    assert not list(files.glob("*.part"))  # written anew and renamed


@pytest.mark.parametrize("algorithm", ["AFL", "SCAFFOLD", "MOON"])  # with state of the server, by client, of clients
def test_killed_in_a_round(tmp_path, algorithm):
    check(tmp_path, algorithm, "in a round")


def test_killed_while_saving(tmp_path):
    check(tmp_path, "FedLF", "while saving")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in a round", "in a round, saved per client", "while saving"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_killed(tmp_path, algorithm, where):
    check(tmp_path, algorithm, where)


def test_killed_while_a_personal_model_is_written(tmp_path):
    """Files of a round that never counted are there already, one of them cut short."""
    process = started(killed_files.fit_and_die, tmp_path)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    own = tmp_path / "own"
    assert len(list(own.rglob(f"round-{killed_files.DEATH:06d}.pt"))) == 2
    assert len(list(own.rglob("*.part"))) == 1
    found = fl.newest_checkpoint(tmp_path / "checkpoints")
    assert torch.load(found, weights_only=True)["epoch"] == killed_files.DEATH - 1
    resumed, strategy = killed_files.fit_in_files(tmp_path, "own", found)
    whole, other = killed_files.fit_in_files(tmp_path / "whole", "own")
    assert torch.equal(weights(resumed), weights(whole))
    for client in range(6):
        one, two = (s.client_rule.personal_model(client) for s in (strategy, other))
        assert torch.equal(one.params, two.params)
        assert torch.equal(one.buffers, two.buffers)
    values = [s.last_evaluation.values for s in (strategy, other)]
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[1])
    assert not list(own.rglob("*.part"))
