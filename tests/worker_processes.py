# SPDX-License-Identifier: Apache-2.0
"""Executors that must give the bits of one client after the other, and that no process is left behind."""

import os
import pickle
import signal
import sys
from pathlib import Path

import pytest
import torch
from resuming import Project, differences
from support import Classifier

import fl_lightning as fl


class Here(fl.executors.Executor):
    """Lets no worker but this process answer requests, the last one first, from nothing but bytes."""

    def start(self, work):
        return Desk(pickle.loads(pickle.dumps(work)))


class Desk(fl.executors.Workers):
    def __init__(self, work):
        self.work = work

    def run(self, shared, requests):
        for place in reversed(range(len(requests))):
            yield place, self.work(shared, requests[place])

    def stop(self):
        self.work = None


TWO, HERE = fl.executors.Parallel(workers=2), Here()
EXECUTORS = (None, TWO, HERE)


class Failing(Classifier):
    """Fails at some samples, in the way it is told to."""

    def __init__(self, how="raise", **options):
        super().__init__(**options)
        self.how = how

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and len(batch[1]) == 10 and 2 in batch[1][:2] and self.current_epoch == 1:
            if self.how == "raise":
                raise ArithmeticError("no such batch")
            if self.how == "exit":
                os._exit(3)
            if self.how == "unpicklable":
                raise type("LocalError", (Exception,), {})("cannot travel")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def some(values, quick):
    """Cases of all values, those that are not quick among the slow ones."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]


def compared(folder, module, algorithm=fl.algorithms.FedAvg, fallback=None, **options):
    """Fits a module with every executor, which must not differ."""
    outcomes = []
    for executor in EXECUTORS:
        strategy = {"clients_per_round": 5, **options, "executor": executor}
        rounds = getattr(module, "rounds", 2)
        outcomes.append(Project(algorithm, module=module, strategy=strategy, rounds=rounds).fit(folder))
    one, *others = outcomes
    shown = [{k: repr(v) for k, v in o.trainer.callback_metrics.items() if k != "fed/seconds"} for o in outcomes]
    for other, values in zip(others, shown[1:], strict=True):
        found = differences(one.state, other.state) + differences(one.rows, other.rows)
        assert not found, found[:5]
        assert values == shown[0]
        assert other.strategy.executor_fallback == fallback


FORKS = [
    pytest.mark.skipif(sys.platform != "linux", reason="workers are made by fork"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a process that may have used a GPU cannot be copied"),
    pytest.mark.usefixtures("no_process_is_left"),
]


others: list[int] = []  # children when the test began, such as multiprocessing's resource tracker


def worker_ids() -> list[int]:
    """Ids of the processes that the test has started and that still are."""
    return [pid for pid in children() if pid not in others]


def children() -> list[int]:
    """Ids of processes that were started here and still are, ended ones that nobody waited for included.

    Those in which torch compiles stay until Python ends.
    """
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    started = map(int, path.read_text().split()) if path.exists() else ()
    return sorted(pid for pid in started if not compiles(pid))


def compiles(pid: int) -> bool:
    """Whether a process is one of the pool of torch.compile."""
    try:
        return b"compile_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return False
