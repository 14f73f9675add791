# SPDX-License-Identifier: Apache-2.0
"""Carries out several tasks at a time, each in a process of its own that is a copy of this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

import torch

from fl_lightning.clients.workers.process import WorkerProcess, death, start, stop

Key = TypeVar("Key")
Task = Callable[[Callable[[], None]], Any]
"""Something to do; gets a function to call after every round."""


@dataclass(frozen=True)
class Failure:
    """Why a task came to nothing."""

    error: str


@dataclass(frozen=True)
class _Round:
    """A task tells of a round."""


def work(tasks: Mapping[Key, Task], jobs: int, told: Callable[[Key], None], done: Callable[[Key, Any], None]) -> None:
    """Carries out all tasks; with one at a time, in this process.

    Args:
        tasks: what to do, in this order.
        jobs: how many at a time.
        told: called when a task tells of a round.
        done: called with a task's result, or its :class:`Failure`. Others go on.

    Raises:
        RuntimeError: several at a time are not possible here.
    """
    if jobs == 1:
        for key, task in tasks.items():
            done(key, _outcome(task, lambda key=key: told(key))[0])  # type: ignore[misc]
        return
    if not hasattr(os, "fork") or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        reason = "this process has used CUDA already" if hasattr(os, "fork") else "this system has no fork"
        raise RuntimeError(f"jobs must be 1, found {jobs}: {reason}, and cannot be copied")
    _Pool(jobs, told, done).work(tasks)


class _Pool:
    """The processes at work."""

    def __init__(self, jobs: int, told: Callable[[Any], None], done: Callable[[Any, Any], None]) -> None:
        self._told, self._done = told, done
        self._free = list(range(jobs))
        self._busy: dict[Connection, tuple[Any, int, WorkerProcess]] = {}

    def work(self, tasks: Mapping[Key, Task]) -> None:
        waiting = list(tasks.items())
        try:
            while waiting or self._busy:
                while waiting and self._free:
                    self._start(*waiting.pop(0))
                for channel in wait(list(self._busy)):
                    self._hear(cast("Connection", channel))
        finally:
            stop([worker for _, _, worker in self._busy.values()])

    def _start(self, key: Any, task: Task) -> None:
        slot = self._free.pop(0)

        def serve(channel: Connection) -> None:
            use_device(slot)
            channel.send(_outcome(task, lambda: channel.send(_Round())))

        worker = start(serve, [worker for _, _, worker in self._busy.values()])
        self._busy[worker.channel] = key, slot, worker

    def _hear(self, channel: Connection) -> None:
        key, slot, worker = self._busy[channel]
        try:
            message = channel.recv()
        except (EOFError, OSError):
            message = None
        if isinstance(message, _Round):
            self._told(key)
            return
        del self._busy[channel]
        self._free.append(slot)
        channel.close()
        ended = death(worker)
        self._done(key, Failure(f"its process {ended}") if message is None else message[0])


def use_device(slot: int) -> None:
    """Shows this process one of several CUDA devices, before it uses any."""
    count = torch.cuda.device_count()
    if count > 1:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = shown.split(",")[slot % count]


def _outcome(task: Task, tell: Callable[[], None]) -> tuple[Any]:
    """In a tuple, because ``None`` is a result as well."""
    try:
        return (task(tell),)
    except (Exception, SystemExit) as error:
        return (Failure(f"{type(error).__name__}: {error}"),)
