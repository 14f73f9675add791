# SPDX-License-Identifier: Apache-2.0
"""Tasks in processes of their own."""

import os
import signal
import sys
import time

import pytest
import torch

from fl_lightning.comparison.pool import use_device, work


def carried_out(tasks, jobs):
    results = {}
    work(tasks, jobs, results.__setitem__)
    return results


def good():
    pass


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_every_task_is_carried_out(tmp_path, jobs):
    tasks = {key: (tmp_path / str(key)).touch for key in (3, 0, 1)}
    assert carried_out(tasks, jobs) == {3: "", 0: "", 1: ""}
    assert len(list(tmp_path.iterdir())) == 3


def test_so_many_run_at_a_time_and_in_processes_of_their_own(tmp_path):
    def task():
        (tmp_path / str(os.getpid())).touch()
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)

    carried_out({"a": task, "b": task}, 2)
    assert len({*(path.name for path in tmp_path.iterdir()), str(os.getpid())}) == 3


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def ended():
    os._exit(7)


def wrong():
    raise ValueError("no luck")


def exits():
    sys.exit(3)


def test_tasks_that_fail_or_die_say_why_and_the_others_go_on():
    tasks = {"killed": killed, "good": good, "ended": ended, "wrong": wrong, "exits": exits, "last": good}
    assert carried_out(tasks, 2) == {
        "killed": "its process was killed by SIGKILL: perhaps memory ran out", "good": "",
        "ended": "its process ended with exit code 7", "wrong": "ValueError: no luck", "exits": "SystemExit: 3",
        "last": "",
    }  # fmt: skip


def test_an_error_here_ends_the_processes(tmp_path):
    def waits():
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(600)

    def quick():
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)

    def stop(key, result):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work({"a": waits, "b": quick}, 2, stop)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_process_that_cannot_be_copied_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="jobs must be 1, found 2: this process has used CUDA already"):
        carried_out({"a": good}, 2)
    assert carried_out({"a": good}, 1) == {"a": ""}


@pytest.mark.parametrize(
    ("count", "visible", "expected"),
    [
        (4, None, ["0", "1", "2", "3", "0"]),
        (2, "5,7", ["5", "7", "5", "7", "5"]),
        (1, "5", ["5"] * 5),
        (0, None, [None]),
    ],
)
def test_processes_take_devices_in_turn(monkeypatch, count, visible, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for slot, device in enumerate(expected):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        use_device(slot)
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == device
