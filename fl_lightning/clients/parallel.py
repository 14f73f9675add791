# SPDX-License-Identifier: Apache-2.0
"""Several clients at a time, in worker processes: copies of this process to which it hands out clients over pipes."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize

import torch
from torch import Tensor

from fl_lightning.arguments import Bounds, checked
from fl_lightning.clients.base import CohortExecutor, CohortRunner, DispatchingRunner, bound_here
from fl_lightning.clients.client_runner import ClientRunner
from fl_lightning.clients.update_rows import Upload
from fl_lightning.clients.visits import VisitOutcome, VisitRecorder, packed
from fl_lightning.core.processes import Fork, pack, stop, unpack
from fl_lightning.core.tensors import padded
from fl_lightning.lightning.batches import ClientTask


@checked(workers=Bounds(1), timeout=Bounds(above=0))
@dataclass(frozen=True)
class Parallel(CohortExecutor):
    """Trains several clients at a time in worker processes, on the CPU of a Linux machine.

    Weights, losses, logged values and states are those of :class:`Sequential` on one thread, bit for bit. The workers
    of a round are copies of this process as it is then (fork), with one thread each. Only the update matrix lies in
    shared memory. What clients leave behind is joined here, in cohort order.

    Args:
        workers: processes; ``None``: one for every processor core that this process may use.
        timeout: seconds that one client's training may take in a worker process. A worker that takes longer is killed,
            and its client has failed (``on_client_error``). ``None``: any time, since nobody but you can know how long
            a client takes.

    Raises:
        ValueError: ``workers`` or ``timeout`` is not positive.
    """

    workers: int | None = None
    timeout: float | None = None

    def obstacle(self, clients: ClientRunner) -> str | None:
        """Why nothing can be trained in other processes here."""
        device = clients.global_params.device
        if device.type != "cpu":
            return f"worker processes train on the CPU, and this fit runs on {device}"
        if sys.platform != "linux":
            return f"worker processes are copies of a running process, which {sys.platform} does not support safely"
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Adam, for one, asks CUDA for its stream wherever there is a GPU, also for parameters on the CPU.
            return "this process has used CUDA, which copies of it cannot use again"
        return bound_here(clients)

    def runner(self, clients: ClientRunner) -> CohortRunner:
        """Forks when the first client of a round is asked for."""
        return ParallelRunner(clients, self.workers or len(os.sched_getaffinity(0)), self.timeout)

    def rows(self, number: int, like: Tensor) -> Tensor:
        """Memory that worker processes share."""
        if like.device.type != "cpu":
            return super().rows(number, like)
        n, width = like.numel(), padded(like.numel(), like.dtype)
        # Anonymous: no name to leak, no limit of a file system for shared memory.
        memory = mmap.mmap(-1, number * width * like.element_size())
        return torch.frombuffer(memory, dtype=like.dtype).view(number, width)[:, :n]


class WorkerDiedError(RuntimeError):
    """A worker process ended before it had trained a client."""


class _Worker(Fork):
    """A worker process, which serves until its channel is closed."""

    places: tuple[int, ...] = ()  # among the round's tasks: of the client that it trains, and of the next one
    since: float = 0.0  # by ``time.monotonic()``


class ParallelRunner(DispatchingRunner):
    """Lets workers train the clients of a round. This process trains no client itself while they can."""

    min_clients = 2

    def __init__(self, clients: ClientRunner, workers: int, timeout: float | None = None) -> None:
        super().__init__(clients, "Parallel")
        self._size, self._timeout = min(workers, len(clients.rows)), timeout
        self._workers: list[_Worker] = []
        Finalize(self, stop, (self._workers,), exitpriority=0)
        # Python 3.12 warns of threads that do not exist in copies, which use none of them.
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)

    def begin_round(self, tasks: Sequence[ClientTask]) -> None:
        """See :meth:`DispatchingRunner.begin_round`."""
        self.close()  # workers are copies of the fit as the last round found it
        super().begin_round(tasks)

    def train(self, task: ClientTask) -> Upload:
        """See :meth:`DispatchingRunner.train`."""
        for worker in self._workers:  # it may have waited for this process until now
            worker.since = time.monotonic()
        return super().train(task)

    def end_round(self) -> None:
        """Waits until all workers have said that they are done; they end by themselves, which takes milliseconds."""
        while self._serving():
            self.receive()
        super().end_round()

    def close(self) -> None:
        """Ends all workers."""
        stop(self._workers)
        self._workers.clear()

    # ---- in this process

    def dispatch(self, places: list[int]) -> None:
        """Makes new workers, which are copies of this process as it is now."""
        self._waiting = places[::-1]  # those that nobody trains yet; the next one is the last
        for _ in range(min(self._size, len(places))):
            self._start()

    def _start(self) -> None:
        self._workers.append(_Worker(self._serve))
        self._hand_out(self._workers[-1])

    def _hand_out(self, worker: _Worker) -> None:
        """Tells a worker its next clients, or that there is none; one ahead, as long as the others have enough."""
        worker.since = time.monotonic()
        with contextlib.suppress(ConnectionError):  # it has died, as its channel is about to tell
            while self._waiting and len(worker.places) < (2 if len(self._waiting) > self._size else 1):
                worker.places += (self._waiting.pop(),)
                worker.channel.send(worker.places[-1])
            if not worker.places:
                worker.channel.send(None)

    def _serving(self) -> dict[object, _Worker]:
        return {worker.channel: worker for worker in self._workers if not worker.channel.closed}

    def receive(self) -> None:
        """Waits for workers, and ends those that take too long."""
        serving, limit = self._serving(), self._timeout
        seconds = limit and max(min(worker.since for worker in serving.values()) + limit - time.monotonic(), 0)
        for channel in wait([worker.channel for worker in serving.values()], seconds):
            if channel in self._serving():
                self._receive_from(serving[channel])
        for worker in self._serving().values():
            if limit is not None and time.monotonic() - worker.since > limit:
                worker.kill()
                error = f"it trained for more than timeout={limit:g} s, and its worker process was killed"
                self._lose(worker, TimeoutError(error))

    def _receive_from(self, worker: _Worker) -> None:
        """Takes a message: an outcome, why a worker cannot train, or in the end why its updates cannot be used."""
        try:
            packed = worker.channel.recv_bytes()
        except (EOFError, OSError):
            self._lose(worker, WorkerDiedError(f"its worker process {worker.end()}"))
            return
        ended = not worker.places
        if not ended:
            worker.places = worker.places[1:]
            self._hand_out(worker)
        message = unpack(packed, torch.device("cpu"))
        if isinstance(message, VisitOutcome):
            self._results[message.place] = message
        elif ended:
            self._flaw = self._flaw or message
            worker.channel.close()
        else:
            self.fall_back(f"worker processes cannot train here ({message})")

    def _lose(self, worker: _Worker, error: Exception) -> None:
        """The client of a worker has failed; another worker goes on with the others."""
        worker.channel.close()
        for place in worker.places[:1]:
            self._results[place] = VisitOutcome(place, error=error)
        self._waiting += worker.places[1:]
        if self._waiting:
            self._start()

    # ---- in a worker

    def _serve(self, channel: Connection) -> None:
        """Trains the clients that are handed out."""
        if obstacle := can_train():
            channel.send_bytes(pack(obstacle))
            return
        recorder = VisitRecorder(self._clients)
        with recorder.recording():
            while (place := channel.recv()) is not None:
                outcome = recorder.visit(self._tasks[place], place)
                with contextlib.suppress(Exception):
                    sys.stdout.flush()  # the signal that ends this process leaves no time for it
                channel.send_bytes(packed(outcome))
        flaw = ""
        try:
            self._clients.check_round()
        except ValueError as error:
            flaw = str(error)
        channel.send_bytes(pack(flaw))
        os.killpg(0, signal.SIGKILL)  # with all that clients have started


def can_train() -> str:
    """Why backward passes fail in a copy of this process, if they do."""
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error)
    return ""
