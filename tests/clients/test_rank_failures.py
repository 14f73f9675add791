# SPDX-License-Identifier: Apache-2.0
"""Fits on several processes end everywhere if one of them fails or is asked to end, and go on from there."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import rank_runs
import rank_session
from rank_runs import Copied, FirstCopied, command, differences, finished, folder_of, results, started

import fl_lightning as fl
from fl_lightning.lightning import rank_processes

TROUBLE = rank_runs.SESSION.with_name("rank_trouble.py")
ROUNDS = 3
CASE = "SCAFFOLD with FedLF"

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")]
on_both = pytest.mark.parametrize(
    "torchrun", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["script", "torchrun"]
)


def session(out, ranks, *words, **options):
    return rank_runs.session(out, ranks, *words, program=TROUBLE, **options)


def forked(out, *words, **options):
    return rank_runs.forked(out, 2, *words, program=TROUBLE, **options)


def uninterrupted(resume=None):
    _, *whole = rank_session.trained(CASE, 1, ROUNDS, resume=resume)
    return {CASE: json.loads(json.dumps(whole))}


def resumed(out):
    return uninterrupted(fl.newest_checkpoint(folder_of(out)))


def wait_for(file):
    end = time.monotonic() + 120
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.05)


def test_one_rank_that_is_terminated_in_a_round_ends_all_between_clients(tmp_path):
    forked(tmp_path, "terminate")
    assert results(tmp_path) == [{"round": 1, "error": "SIGTERMException"}] * 2
    assert (folder_of(tmp_path) / "interrupted.ckpt").exists()
    assert differences(uninterrupted(), resumed(tmp_path)) == {}


@on_both
def test_the_program_that_is_terminated_ends_all_ranks(tmp_path, torchrun):
    """The signal reaches the first rank, or torchrun, which passes it on to all."""
    line = command(tmp_path, 2, "long", program=TROUBLE, torchrun=torchrun)
    program = started(tmp_path, line, subprocess.Popen if torchrun else FirstCopied)
    wait_for(folder_of(tmp_path) / "begun")
    program.send_signal(signal.SIGTERM)
    said = finished(tmp_path, program, fails=torchrun)
    assert torchrun or "2 processes on 1 machine" in said
    one, two = results(tmp_path)
    assert one == two
    assert one["error"] == "SIGTERMException"
    assert one["round"] in (1, 2), "whichever round it was when the signal came"
    assert differences(uninterrupted(), resumed(tmp_path)) == {}


def test_all_processes_end_soon_after_the_first_is_killed(tmp_path):
    """Though one of them is in the middle of a step that never ends."""
    with started(tmp_path, command(tmp_path, 2, "hang", program=TROUBLE, torchrun=False), Copied) as program:
        wait_for(folder_of(tmp_path) / "begun")
        assert len(rank_runs.left_behind(tmp_path)) == 2
        program.kill()
    end = time.monotonic() + 5
    while rank_runs.left_behind(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    left = rank_runs.left_behind(tmp_path)
    for process in left:
        os.kill(int(process), signal.SIGKILL)
    assert left == []


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forked", "torchrun"])
def test_a_rank_that_is_killed_in_a_round_ends_all(tmp_path, torchrun):
    """The round does not count; another number of ranks goes on from the checkpoint before it."""
    said = session(tmp_path, 2, "die", fails=True) if torchrun else forked(tmp_path, "die", fails=True)
    assert "rank 0 of 2 waits for rank 1, which has ended: its own output says why" in said
    if torchrun:
        session(tmp_path, 3, "resume")
    ranks = results(tmp_path) if torchrun else [resumed(tmp_path)]
    whole = uninterrupted()
    assert [differences(whole, rank) for rank in ranks] == [{}] * (3 if torchrun else 1)


@pytest.mark.slow
def test_torchrun_starts_a_fit_again_that_goes_on_by_itself(tmp_path):
    session(tmp_path, 2, "die", options=["--max-restarts", "1"])
    many, whole = results(tmp_path), uninterrupted()
    assert [differences(whole, rank) for rank in many] == [{}, {}]


@on_both
def test_a_rank_that_hangs_ends_all_within_the_timeout(tmp_path, torchrun):
    began = time.monotonic()
    kind = {} if torchrun else {"kind": Copied}
    said = session(tmp_path, 2, "hang", torchrun=torchrun, fails=True, **kind)
    assert re.search(r"RankError: rank 0 of 2 waits for rank 1, which has not answered for 0:00:05 \(timeout", said)
    assert time.monotonic() - began < 100  # torchrun waits for 30 s before it kills


def test_a_process_that_does_not_end_is_killed_after_a_grace(monkeypatch):
    monkeypatch.setattr(rank_processes, "_GRACE", 0.5)
    ends, hangs = (subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({t})"]) for t in (0, 1000))
    rank_processes._end([hangs, ends])
    assert (hangs.returncode, ends.returncode in (0, -signal.SIGKILL)) == (-signal.SIGKILL, True)


def test_one_rank_stops_all(tmp_path):
    forked(tmp_path, "stop")
    assert [rank["round"] for rank in results(tmp_path)] == [2, 2]


FAILURES = {
    "weights": r"RankError: after round 2, rank 1 must have the global parameters of rank 0, found others",
    "state": r"RankError: after round 1, rank 1 must have .*AFL\.lam\.\d.* of rank 0, found others",
    "between": r"RankError: Misbehaves changes 'temperature' of the module between the clients of a round",
    "raise": r"OSError: the disk is full",
    "kill": r"RankError: rank 0 of 2 waits for rank 1, which has ended|Signal 9 \(SIGKILL\)",
    "coefficients": r"RankError: after round 2, rank 1 must have the coefficients of the step of rank 0, found others",
    "rows": r"RankError: rank \d finds that row \d of the round must be what its client has sent, and that other bits",
}


def test_weights_that_differ_are_noticed(tmp_path):
    said = forked(tmp_path, "weights", fails=True)
    assert re.search(FAILURES["weights"], said), said[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True], ids=["script", "torchrun"])
@pytest.mark.parametrize("what", FAILURES)
def test_all_processes_end_with_one_that_fails(tmp_path, what, torchrun):
    said = session(tmp_path, 2, what, torchrun=torchrun, fails=True)
    assert re.search(FAILURES[what], said), said[-4000:]


REFUSED = {
    "sizes": "rank 1 differs from rank 0 in data: .*other sizes of the clients.*Seed what draws",
    "places": r"rank 1 differs from rank 0 in data: other samples of the clients\. Seed",
    "validation": "all ranks must evaluate the same data, found that rank 1 differs from rank 0 in the val data: other",
    "option": "rank 1 differs from rank 0 in .*local_epochs: 1 became 2",
    "argument": r"rank 1 differs from rank 0 in method: TERM\(t=1.0\) became TERM\(t=2.0\)",
    "trainer": "rank 1 differs from rank 0 in max_epochs: 3 became 4",
    "module": r"rank 1 differs from rank 0 in options of the optimizers: .*'lr': 0.1, .* became .*'lr': 0.2",
    "shapes": r"the same parameters and buffers, found that rank 1 has \('more.weight', \(2, 2\), .* rank 0 has",
    "version": "rank 1 differs from rank 0 in versions: fl_lightning: 0.0 became 0.1",
}


def test_ranks_that_differ_are_refused_by_rank_and_difference(tmp_path):
    forked(tmp_path, "differ")
    for said in results(tmp_path):
        assert said.keys() == REFUSED.keys()
        assert {name: words for name, words in said.items() if not re.search(REFUSED[name], words)} == {}
