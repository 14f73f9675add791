# SPDX-License-Identifier: Apache-2.0
"""Ends worker processes that take too long: stopped ones, and those in which somebody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fl_lightning.clients.workers.pool import WorkerPool


class Watchdog:
    """A thread that kills busy workers whose clients have been in training for longer than a limit.

    A thread, because this process itself may be in the middle of a message when the worker at its other end stops.

    Args:
        pool: the workers.
        since: shared memory, one number per worker: when it began what it is at, by ``time.monotonic()``.
        limit: seconds; ``None``: nothing is killed, and there is no thread.

    Attributes:
        limit: seconds.
        killed: indices of workers that were killed, until a new round begins.
    """

    def __init__(self, pool: WorkerPool, since: Tensor, limit: float | None) -> None:
        self._pool, self._since, self.limit = pool, since, limit
        self.killed: set[int] = set()
        self._waiting_since: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fl_lightning-watchdog", daemon=True)

    def begin(self) -> None:
        """All workers are given work now."""
        self.killed.clear()
        self._since.fill_(time.monotonic())
        if self.limit is not None and not self._thread.is_alive() and not self._over.is_set():
            self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While this process does nothing but wait for workers; at other times they may be waiting for it."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        assert self.limit is not None
        while not self._over.wait(min(self.limit / 4, 1.0)):
            waiting = self._waiting_since
            if waiting is None:
                continue
            for index in list(self._pool.busy):
                if time.monotonic() - max(waiting, float(self._since[index])) > self.limit:
                    self.killed.add(index)
                    self._pool.kill(index)
