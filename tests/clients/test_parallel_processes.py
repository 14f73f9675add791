# SPDX-License-Identifier: Apache-2.0
"""Worker processes beside others: their threads and their children."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from support import Classifier, fresh, train
from worker_processes import FORKS, TWO

pytestmark = FORKS


@pytest.mark.timeout(120)
def test_workers_have_one_thread():
    class Threads(Classifier):
        def training_step(self, batch, batch_idx):
            self.log("threads", float(torch.get_num_threads()), on_epoch=True)
            return super().training_step(batch, batch_idx)

    torch.set_num_threads(2)
    done = train(fresh(Threads), 1, executor=TWO)
    assert done.strategy.executor_fallback is None
    assert done.trainer.callback_metrics["threads"] == 1
    assert torch.get_num_threads() == 2


def runs(pid):
    """Whether a process is there and has not ended."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_workers_have_started_ends_with_them():
    class Starting(Classifier):
        def training_step(self, batch, batch_idx):
            child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
            Path(f"started-{child.pid}").touch()
            return super().training_step(batch, batch_idx)

    train(fresh(Starting), 1, executor=TWO)
    children = [int(path.name.partition("-")[2]) for path in Path().glob("started-*")]
    try:
        until = time.monotonic() + 5
        while any(map(runs, children)) and time.monotonic() < until:
            time.sleep(0.05)
        assert children
        assert not any(map(runs, children))
    finally:
        for child in filter(runs, children):
            os.kill(child, signal.SIGKILL)
