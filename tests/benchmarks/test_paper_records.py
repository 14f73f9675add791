# SPDX-License-Identifier: Apache-2.0
"""Lines of the papers' runs: in a file per run, then in one compressed file per experiment."""

import lzma
import queue
from pathlib import Path

import pytest

from benchmarks.papers.experiment import Case, Job, Log
from benchmarks.papers.records import claim, pack, recorded
from benchmarks.papers.runner import work

ORIGIN = {"commit": "c0ffee", "fl_lightning": "0", "torch": "1", "lightning": "2", "python": "3"}


def job_of(out, case="Pat-2: FedLF", seed=0, rounds=10):
    return Job("trial", case, seed, rounds, out, out, "cpu", ORIGIN)


def record(job, *rounds, start=0):
    log = Log(job)
    log.cut(start)
    for number in rounds:
        log.write(number, {"mean": number / 7, "above": float("nan"), "clients": [0.1, 1e-7]}, 1.0)
    return job.lines.read_bytes()


def packed(out):
    return out / "trial.jsonl.xz"


def rounds_of(job):
    return [line["round"] for line in job.recorded()]


def own_files(out):
    return sorted(path.name for path in (out / "trial").glob("*.jsonl"))


def test_packing_keeps_every_byte_and_again_changes_nothing(tmp_path):
    jobs = [job_of(tmp_path, "Pat-2: FedLF", 1), job_of(tmp_path, "A", 0), job_of(tmp_path, "Pat-2: FedLF", 0)]
    one, other, first = (record(job, 2, 4, 10) for job in jobs)
    with jobs[0].lines.open("a") as file:
        file.write('{"round": 12, "me')  # killed in the middle of a line
    pack(tmp_path, "trial")
    assert own_files(tmp_path) == []
    content = packed(tmp_path).read_bytes()
    assert lzma.decompress(content) == other + first + one
    assert [rounds_of(job) for job in jobs] == [[2, 4, 10]] * 3
    pack(tmp_path, "trial")
    assert packed(tmp_path).read_bytes() == content
    record(jobs[1], start=10)  # the same lines in both
    pack(tmp_path, "trial")
    assert packed(tmp_path).read_bytes() == content
    assert own_files(tmp_path) == []


@pytest.mark.parametrize("step", ["write_bytes", "replace", "unlink"])
def test_a_kill_while_packing_loses_nothing(tmp_path, monkeypatch, step):
    record(job_of(tmp_path, "old"), 5, 10)
    pack(tmp_path, "trial")
    for seed in (0, 1):
        record(job_of(tmp_path, "new", seed), 5, 10)
    known = {run: [line["round"] for line in lines] for run, lines in recorded(tmp_path, "trial").items()}
    assert len(known) == 3
    count = {"unlink": 2}.get(step, 1)
    done = getattr(Path, step)

    def killed(path, *arguments):
        nonlocal count
        count -= 1
        if count:
            return done(path, *arguments)
        if step == "write_bytes":
            done(path, arguments[0][:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, step, killed)
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path, "trial")
    monkeypatch.undo()
    assert own_files(tmp_path), "it was killed before the end"
    for _ in range(2):
        left = {run: [line["round"] for line in lines] for run, lines in recorded(tmp_path, "trial").items()}
        assert left == known
        pack(tmp_path, "trial")
    assert own_files(tmp_path) == []


def test_a_run_goes_on_from_packed_lines(tmp_path):
    job = job_of(tmp_path)
    before = record(job, 2, 4, 6)
    pack(tmp_path, "trial")
    after = record(job, 5, 8, start=4)
    assert after.splitlines()[:2] == before.splitlines()[:2]
    assert rounds_of(job) == [2, 4, 5, 8]
    pack(tmp_path, "trial")
    assert lzma.decompress(packed(tmp_path).read_bytes()) == after


def test_lines_that_go_further_count(tmp_path):
    job = job_of(tmp_path)
    record(job, 2, 4, 6)
    pack(tmp_path, "trial")
    record(job)
    assert rounds_of(job) == [2, 4, 6], "nothing written yet"
    anew = record(job, 3)
    assert rounds_of(job) == [2, 4, 6]
    pack(tmp_path, "trial")
    assert rounds_of(job) == [2, 4, 6]
    assert job.lines.read_bytes() == anew, "the run from the start can still go on"
    record(job, 6, start=3)
    assert rounds_of(job) == [3, 6], "of equals the newer one"
    pack(tmp_path, "trial")
    assert (own_files(tmp_path), rounds_of(job)) == ([], [3, 6])


def test_a_run_that_goes_on_keeps_its_file(tmp_path):
    job, complete = job_of(tmp_path), job_of(tmp_path, seed=1)
    record(complete, 10)
    record(job, 2)
    with claim(job.lock) as mine:
        assert mine
        pack(tmp_path, "trial")
        assert own_files(tmp_path) == [job.lines.name]
        Log(job).write(4, {}, 1.0)
    pack(tmp_path, "trial")
    assert (own_files(tmp_path), rounds_of(job), rounds_of(complete)) == ([], [2, 4], [10])


class Short(Case):
    name, rounds, seeds, published = "short", 4, (0,), {}

    def check(self, root):
        pass

    def cost(self, rounds):
        return 1.0

    def execute(self, job, log):
        record(job, 2, 4)


def test_two_processes_do_not_do_the_same_run(tmp_path):
    job, messages = job_of(tmp_path, "short", rounds=4), queue.Queue()
    with claim(job.lock):
        work(Short(), job, messages)
    assert rounds_of(job) == []
    for _ in range(2):
        work(Short(), job, messages)
    said = [messages.get_nowait()[2] for _ in range(3)]
    assert said == ["left to another process, which is at it", "4 rounds in 0:00 min", "completed by another process"]
    assert rounds_of(job) == [2, 4]
