# SPDX-License-Identifier: Apache-2.0
"""Several clients at a time, in processes of their own: hands out clients, and replaces workers that died."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from fl_lightning.algorithms.base import obstacle
from fl_lightning.arguments import Bounds, checked
from fl_lightning.clients.base import CohortRunner, Executor
from fl_lightning.clients.client_runner import ClientRunner
from fl_lightning.clients.update_rows import Upload
from fl_lightning.clients.visits import Outcome, Replays
from fl_lightning.clients.workers import process
from fl_lightning.clients.workers.process import STOP, RoundDone, WorkerPool, WorkerReady
from fl_lightning.clients.workers.worker import Worker
from fl_lightning.core.tensors import padded
from fl_lightning.lightning.batches import ClientTask
from fl_lightning.lightning.inspection import profiler_of, step_hooks, users_callback
from fl_lightning.lightning.names import rank_zero_info

_ATTEMPTS = 3


@checked(workers=Bounds(1), timeout=Bounds(above=0))
@dataclass(frozen=True)
class Parallel(Executor):
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
        trainer, rule, device = clients.trainer, clients.rule, clients.global_params.device
        if device.type != "cpu":
            return f"worker processes train on the CPU, and this fit runs on {device}"
        if sys.platform != "linux":
            return f"worker processes are copies of a running process, which {sys.platform} does not support safely"
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Adam, for one, asks CUDA for its stream wherever there is a GPU, also for parameters on the CPU.
            return "this process has used CUDA, which copies of it cannot use again"
        profiler = profiler_of(trainer)
        if profiler is not None:
            return f"Trainer(profiler={profiler}) would not see what happens in worker processes"
        hook = next(step_hooks(trainer.callbacks), None)  # type: ignore[attr-defined]
        if hook is not None:
            return f"{hook} would run in worker processes"
        between = users_callback(trainer.callbacks, "on_train_batch_start", "on_train_batch_end")  # type: ignore[attr-defined]
        if between is not None:
            return f"worker processes would not see what {type(between).__name__} does between two clients"
        return obstacle(rule) or next(iter(clients.visits.in_turn()), None)

    def runner(self, clients: ClientRunner) -> CohortRunner:
        """Forks when the first client of a round is asked for."""
        return ParallelRunner(clients, self.workers or len(os.sched_getaffinity(0)), self.timeout)

    def rows(self, number: int, like: Tensor) -> Tensor:
        """Memory that worker processes share."""
        if like.device.type != "cpu":
            return super().rows(number, like)
        n = like.numel()
        return process.shared((number, padded(n, like.dtype)), like.dtype)[:, :n]


class WorkerDiedError(RuntimeError):
    """A worker process ended before it had trained a client."""


class ParallelRunner(CohortRunner):
    """Lets workers train the clients of a round, and hands over in order what they left behind.

    This process trains no client itself while workers can. A worker's result has no effect here before the client's
    turn, and every visit begins with the module as the round found it: where no worker can be made, this process trains
    the clients that are left.
    """

    def __init__(self, clients: ClientRunner, workers: int, timeout: float | None = None) -> None:
        self._clients, self._workers = clients, min(workers, len(clients.rows))
        self._pool = WorkerPool(self._workers)
        weakref.finalize(self, self._pool.stop)
        self._timeout, self._killed = timeout, set[int]()  # indices of workers
        self._since = process.shared((self._workers,), torch.float64)  # by time.monotonic(), and
        self._places = process.shared((self._workers,), torch.int64)  # what each worker is at
        self._replays = Replays(clients)
        process.expect_forks()
        self.begin_round([])

    # ---- rounds

    def begin_round(self, tasks: Sequence[ClientTask]) -> None:
        """Workers begin when the first client is asked for."""
        self._tasks, self._costs = list(tasks), [0] * len(tasks)
        self._turn = -1  # place of the client that is being handed over
        self._results: dict[int, Outcome] = {}
        self._under_way, self._flaw = False, ""
        self._attempts, self._left = 0, len(tasks)  # to train clients whose workers have died

    def train(self, task: ClientTask) -> Upload:
        """Hands over the next client as soon as it is trained."""
        self._turn += 1
        if self.fallback is not None or len(self._tasks) < 2:
            return self._clients.train(task)
        try:
            if not self._under_way:
                self._send_out()
            self._since.clamp_(min=time.monotonic())  # workers may have waited for this process until now
            while self._under_way and self._turn not in self._results:
                self._listen()
        except Exception as error:
            # No client has failed here, so none may be dropped for it: what clients raise comes with their results.
            self._fall_back(f"{type(error).__name__} between this process and its workers: {error}")
        except BaseException:
            self._discard()
            raise
        if not self._under_way:
            return self._clients.train(task)
        return self._replays.replay(task, self._results.pop(self._turn))

    def end_round(self) -> None:
        """Waits until all workers are idle."""
        self._turn = len(self._tasks)
        self._since.clamp_(min=time.monotonic())
        while self._under_way and self._pool.busy:
            self._listen()
        self._pool.release()
        self._results, self._under_way = {}, False
        if self._flaw:
            raise ValueError(self._flaw)

    def close(self) -> None:
        """Ends all workers."""
        self._discard()

    def _discard(self) -> None:
        self._pool.stop()
        self._results, self._under_way = {}, False

    # ---- work out

    def _send_out(self) -> None:
        """Lets workers begin with the client whose turn it is and those after it."""
        self._costs = [self._clients.planned_cost(task) for task in self._tasks]
        self._clients.visits.look()  # workers and this process give objects the same numbers
        self._hand_out(range(self._turn, len(self._tasks)))
        self._under_way = True

    def _hand_out(self, places: Sequence[int]) -> None:
        self._places.fill_(STOP)
        self._killed.clear()
        self._since.fill_(time.monotonic())
        self._pool.start(self._run, sorted(places, key=lambda place: -self._costs[place]))  # the longest first

    def _run(self, index: int, channel: Connection, queue: int) -> None:
        mine = slice(index, index + 1)
        Worker(self._clients, self._tasks, self._places[mine], self._since[mine], channel, queue).serve()

    # ---- work in

    def _listen(self) -> None:
        """Waits for one message or more, and ends workers that take too long."""
        limit = self._timeout
        for index, message in self._pool.messages(None if limit is None else min(limit / 4, 1.0)):
            if isinstance(message, WorkerReady):
                if message.obstacle:
                    self._fall_back(f"worker processes cannot train here ({message.obstacle})")
                    return
            elif isinstance(message, RoundDone):
                self._flaw = self._flaw or message.flaw
            elif isinstance(message, Outcome):
                self._results[message.place] = message
            else:
                self._fail_client_of(index, message)
        for index in self._pool.busy - self._killed:
            if limit is not None and time.monotonic() - float(self._since[index]) > limit:
                self._killed.add(index)
                self._pool.kill(index)
        if self._pool.busy:
            return
        left = [place for place in range(max(self._turn, 0), len(self._tasks)) if place not in self._results]
        if left:  # with somebody who has died
            self._attempts = self._attempts + 1 if len(left) == self._left else 0
            self._left = len(left)
            if self._attempts > _ATTEMPTS:
                raise WorkerDiedError(f"worker processes end before they train a client, {_ATTEMPTS} times in a row")
            self._hand_out(left)

    def _fail_client_of(self, index: int, end: str) -> None:
        """A worker has died: its client has failed, the others go on."""
        place = int(self._places[index])
        if place != STOP and place >= self._turn and place not in self._results:
            error: Exception = WorkerDiedError(f"its worker process {end}")
            if index in self._killed:
                error = TimeoutError(
                    f"it trained for more than timeout={self._timeout:g} s, and its worker process was killed"
                )
            self._results[place] = Outcome(place, error=error)

    def _fall_back(self, reason: str) -> None:
        """Trains this client and all that follow in this process; those handed over have left no such trace."""
        self._discard()
        self.fallback = reason
        rank_zero_info(f"Parallel trains this fit's clients one after the other from now on: {reason}")
