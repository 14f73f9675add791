# SPDX-License-Identifier: Apache-2.0
"""What each process of a side spends in a round: time, processor time, bytes sent, and where the time goes."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._peers.traffic import Traffic


class Meter:
    """Measures the rounds of one process; those of several processes begin together.

    Attributes:
        rank: of this process, as torchrun tells it; 0 for one process.
        size: processes.
    """

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._stack: list[str] = []
        # A group of its own: processes that wait for their turn with NCCL would keep the GPUs busy.
        self._group = dist.new_group(backend="gloo") if self.size > 1 else None
        self._traffic = Traffic()

    def begin(self) -> None:
        """A round begins, for all processes at the same time."""
        if self.size > 1:
            dist.barrier(self._group)
        self._parts: dict[str, list[float]] = {}
        self._traffic.sent = 0
        self._mark = self._began = self._now()

    def end(self, steps: int | None) -> list[dict[str, Any]]:
        """A round is over.

        Args:
            steps: local steps that this process knows of.

        Returns:
            What the processes have seen, in the order of ranks, on the first; nothing on the others.
        """
        now = self._now()
        found = {
            "seconds": now[0] - self._began[0], "cpu": now[1] - self._began[1], "sent": self._traffic.sent,
            "parts": self._parts, "steps": steps,
        }  # fmt: skip
        if self.size == 1:
            return [found]
        everyones: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(found, everyones, group=self._group)
        return everyones or []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens meanwhile is part ``name`` of the round, but for parts within."""
        self._account()
        self._stack.append(name)
        try:
            yield
        finally:
            self._account()
            self._stack.pop()

    def watch(self, owner: object, method: str, name: str) -> None:
        """Takes calls of a method for part ``name`` of the round."""
        whole = getattr(owner, method)

        @functools.wraps(whole)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return whole(*args, **kwargs)

        setattr(owner, method, timed)

    def _account(self) -> None:
        now = self._now()
        if self._stack and hasattr(self, "_mark"):
            part = self._parts.setdefault(self._stack[-1], [0.0, 0.0])
            part[0] += now[0] - self._mark[0]
            part[1] += now[1] - self._mark[1]
        self._mark = now

    @staticmethod
    def _now() -> tuple[float, float]:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # not the device: messages may travel on other streams
        return time.perf_counter(), time.process_time()
