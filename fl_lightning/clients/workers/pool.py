# SPDX-License-Identifier: Apache-2.0
"""A number of worker processes, and the queue of places from which they take their work."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from fl_lightning.clients.workers import process
from fl_lightning.clients.workers.process import WorkerProcess
from fl_lightning.clients.workers.worker import STOP, RoundDone

Target = Callable[[int, Connection, int], None]
"""Runs in a worker: its index, its channel, and the file descriptor of the queue."""


class WorkerPool:
    """Starts workers, gives them work, and hears of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: dict[int, WorkerProcess] = {}
        self._queue: tuple[int, int] | None = None
        self._ending: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._waiting = b""
        self.busy: set[int] = set()  # indices of the workers that are in the middle of a round

    def start(self, target: Target, places: Sequence[int]) -> None:
        """Makes new workers, which are copies of this process as it is now, and queues places for them."""
        self.stop()
        reading, writing = self._queue = os.pipe()
        os.set_blocking(writing, False)
        numbers = [*places, *[STOP] * self._size]
        self._waiting = b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)
        self._feed()

        def run(index: int, channel: Connection) -> None:
            os.close(writing)
            target(index, channel, reading)

        for index in range(self._size):
            self._workers[index] = worker = process.start(
                lambda channel, index=index: run(index, channel),  # type: ignore[misc]
                self._workers.values(),
            )
            self._selector.register(worker.channel, selectors.EVENT_READ, index)
            self.busy.add(index)

    def _feed(self) -> None:
        """Fills the queue, which holds some thousand places."""
        assert self._queue is not None
        with contextlib.suppress(BlockingIOError):
            while self._waiting:
                written = os.write(self._queue[1], self._waiting[:4096])  # up to here, all or nothing
                self._waiting = self._waiting[written:]

    def messages(self, seconds: float | None = None) -> Iterator[tuple[int, Any]]:
        """Waits for workers, at most so long; yields their indices and messages, or as text how one has ended."""
        for key, _ in self._selector.select(seconds):
            index = key.data
            try:
                message = process.receive(self._workers[index].channel)
            except (EOFError, OSError):
                worker = self._workers.pop(index)
                self._selector.unregister(worker.channel)
                worker.channel.close()
                self.busy.discard(index)
                message = process.death(worker)
            if isinstance(message, RoundDone):
                self.busy.discard(index)
            yield index, message
        if self._waiting:
            self._feed()

    def kill(self, index: int) -> None:
        """Ends one worker; :meth:`messages` will tell."""
        process.kill(self._workers[index])

    def release(self) -> None:
        """Lets workers that are done end by themselves: a large process takes milliseconds to go away."""
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            self._selector.unregister(worker.channel)
            self._ending.append(worker)

    def stop(self) -> None:
        """Ends all workers at once, and waits until they are gone."""
        self.release()
        process.stop(self._ending)
        self._ending = []
        self.busy, self._waiting = set(), b""
        if self._queue is not None:
            for descriptor in self._queue:
                os.close(descriptor)
            self._queue = None
