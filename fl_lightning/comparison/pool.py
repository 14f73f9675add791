# SPDX-License-Identifier: Apache-2.0
"""Carries out several tasks at a time, each in a process of its own that is a copy of this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import TypeVar, cast

import torch

from fl_lightning.core.processes import Fork, stop

Key = TypeVar("Key")
Task = Callable[[], None]


def work(tasks: Mapping[Key, Task], jobs: int, done: Callable[[Key, str], None]) -> None:
    """Carries out all tasks in order, so many at a time; with one at a time, in this process.

    ``done`` is called with why a task came to nothing, or with an empty text. Others go on.
    """
    if jobs == 1:
        for key, task in tasks.items():
            done(key, _error(task))
        return
    if not hasattr(os, "fork") or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        reason = "this process has used CUDA already" if hasattr(os, "fork") else "this system has no fork"
        raise RuntimeError(f"jobs must be 1, found {jobs}: {reason}, and cannot be copied")
    waiting, free = list(tasks.items()), list(range(jobs))
    busy: dict[Connection, tuple[Key, int, Fork]] = {}
    try:
        while waiting or busy:
            while waiting and free:
                key, task = waiting.pop(0)
                slot = free.pop(0)
                worker = Fork(_serving(task, slot))
                busy[worker.channel] = key, slot, worker
            for ready in wait(list(busy)):
                channel = cast("Connection", ready)
                key, slot, worker = busy.pop(channel)
                try:
                    message = channel.recv()
                except (EOFError, OSError):
                    message = None
                free.append(slot)
                channel.close()
                ended = worker.end()
                done(key, f"its process {ended}" if message is None else message)
    finally:
        stop(worker for _, _, worker in busy.values())


def _serving(task: Task, slot: int) -> Callable[[Connection], None]:
    def serve(channel: Connection) -> None:
        use_device(slot)
        channel.send(_error(task))

    return serve


def use_device(slot: int) -> None:
    """Shows this process one of several CUDA devices, before it uses any."""
    count = torch.cuda.device_count()
    if count > 1:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = shown.split(",")[slot % count]


def _error(task: Task) -> str:
    try:
        task()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""
