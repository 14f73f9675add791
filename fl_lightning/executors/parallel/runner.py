# SPDX-License-Identifier: Apache-2.0
"""The parent's side of worker processes: what they train, what came of it, and what if one dies."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.core.fingerprint import Fingerprint
from fl_lightning.core.lightning.epoch_loop import ClientTask
from fl_lightning.core.lightning.names import Callback, rank_zero_info
from fl_lightning.executors.base import Runner
from fl_lightning.executors.parallel import messages as _wire
from fl_lightning.executors.parallel.pool import WorkerPool, training_order
from fl_lightning.executors.parallel.worker import STOP, ClientResult, RoundDone, RoundJob, Worker, WorkerReady

if TYPE_CHECKING:
    from fl_lightning.training.client_runner import ClientRunner
    from fl_lightning.training.upload import Upload

_ATTEMPTS = 3


class WorkerDiedError(RuntimeError):
    """A worker process ended before it had trained a client."""


class ParallelRunner(Runner):
    """Lets workers train the clients of a round, and hands over in order what they left behind.

    This process trains no client as long as workers can. What they do leaves no trace here before a client's turn, so
    the fit can go on without them at any client.

    Args:
        bench: where clients are trained; every worker has a copy of it.
        workers: how many.
    """

    def __init__(self, bench: ClientRunner, workers: int) -> None:
        self._bench, self._workers = bench, min(workers, len(bench.server.rows))
        self._team = WorkerPool(self._workers)
        weakref.finalize(self, self._team.stop)
        self._theta = _wire.shared((bench.binding.theta.numel(),), bench.binding.theta.dtype)
        self._places = _wire.shared((self._workers,), torch.int64)  # what each worker is at
        self._image: Fingerprint | None = None  # of what is in the workers' copies
        self._warned: dict[str, dict[Any, Any]] = {}
        callbacks: list[Callback] = bench.trainer.callbacks  # type: ignore[attr-defined]
        self._meddled = any(_acts_between_clients(callback) for callback in callbacks)
        self._alone = False
        self.begin_round([])

    @property
    def processes(self) -> list[int]:
        """Ids of the worker processes."""
        return self._team.processes

    # ---- rounds

    def begin_round(self, tasks: Sequence[ClientTask]) -> None:
        """Workers begin when the first client is asked for."""
        self._tasks, self._costs = list(tasks), [0] * len(tasks)
        self._turn = -1  # place of the client that is being handed over
        self._outcomes: dict[int, ClientResult] = {}
        self._steps: list[int] = []  # at which clients are expected to begin
        self._under_way, self._failed, self._frozen = False, False, ""
        self._attempts, self._left = 0, len(tasks)  # to train clients whose workers have died

    def train(self, task: ClientTask) -> Upload:
        """Hands over the next client as soon as it is trained."""
        self._turn += 1
        if self._alone or len(self._tasks) < 2:
            return self._bench.visit(task)
        try:
            if self._under_way and self._meddled and self._is_stale():
                self._discard()  # a callback has changed what the remaining clients train on
            if not self._under_way:
                self._send_out()
            while self._under_way and self._turn not in self._outcomes:
                self._listen()
        except Exception as error:
            # No client has failed here, so none may be dropped for it: what clients raise comes with their outcomes.
            self._go_on_alone(f"{type(error).__name__} between this process and its workers: {error}")
        except BaseException:
            self._discard()
            raise
        if not self._under_way:
            return self._bench.visit(task)
        return self._accept(task, self._outcomes.pop(self._turn))

    def end_round(self) -> None:
        """Waits until all workers are idle.

        Raises:
            ValueError: parameters without gradients changed in a worker.
        """
        self._turn = len(self._tasks)
        while self._under_way and self._team.busy:
            self._listen()
        self._under_way = False
        if self._frozen:
            raise ValueError(self._frozen)

    def close(self) -> None:
        """Ends all workers."""
        self._discard()

    def _discard(self) -> None:
        self._team.stop()
        self._outcomes, self._under_way = {}, False

    # ---- work out

    def _send_out(self) -> None:
        """Lets workers begin with the client whose turn it is and those after it."""
        bench, first = self._bench, self._turn
        image = self._present()
        carries = type(bench.rule).commit is not ClientRule.commit or bench.options.keep_client_optimizers
        if carries or self._image is None or self._image.changes(image):
            self._team.stop()
        self._image = image
        self._theta.copy_(bench.binding.theta)
        planned = [bench.local.planned_steps(task.client_id or 0) for task in self._tasks]
        full = bench.needs.full_gradients
        self._costs = [task.num_samples for task in self._tasks] if full else planned
        self._steps = list(accumulate([1] * len(planned[first:]) if full else planned[first:], initial=0))
        begin = bench.loop.global_step
        order = RoundJob(
            self._tasks, first, self._steps, bench.loop.standing(), len(bench.server.rows) - 1,
            bench.server.bank.state(), bench.optimizers.options(),
            [config.scheduler.state_dict() for config in bench.trainer.lr_scheduler_configs],
            bench.lr, bench.momentum,
        )  # fmt: skip
        self._order = order
        self._begin = begin
        self._hand_out(range(first, len(self._tasks)))
        self._under_way = True

    def _hand_out(self, places: Sequence[int]) -> None:
        places = [places[i] for i in training_order([self._costs[place] for place in places], self._workers)]
        self._places.fill_(STOP)
        if self._team:
            try:
                self._team.begin(self._order, places)
                return
            except OSError:
                pass  # somebody has died since the last round
        self._team.start(self._run)
        self._team.begin(self._order, places)

    def _run(self, index: int, channel: Connection, queue: int) -> None:
        Worker(self._bench, self._theta, self._places[index : index + 1], channel, queue).serve()

    def _present(self) -> Fingerprint:
        """What workers have copies of and do not hear about."""
        bench, found = self._bench, Fingerprint()
        found.add_module(bench.module, metrics=False)
        found.add_structure(bench.module)
        found.add("optimizers", bench.trainer.optimizers)
        found.add("loaders", bench.loaders)
        found.add("dataset", bench.loaders.dataset)
        if bench.local.hooked:
            found.add("data module", bench.data)
        found.add("rule", [bench.rule, bench.options.attack])
        found.add("frozen parameters", {name: mark.tolist() for name, mark in bench.binding.frozen_marks.items()})
        return found

    def _is_stale(self) -> bool:
        moved = not torch.equal(self._theta, self._bench.binding.theta)
        return moved or self._image is None or bool(self._image.changes(self._present()))

    # ---- work in

    def _listen(self) -> None:
        """Waits for one message or more."""
        for index, message in self._team.messages():
            if isinstance(message, WorkerReady):
                if message.obstacle:
                    self._go_on_alone(f"worker processes cannot train here ({message.obstacle})")
            elif isinstance(message, RoundDone):
                self._frozen = self._frozen or message.frozen
            elif not isinstance(message, ClientResult):
                self._mourn(index, message)
            elif message.changed:
                self._go_on_alone(f"{type(self._bench.module).__name__} {message.changed}")
            else:
                self._outcomes[message.place] = message
            if not self._under_way:
                return
        if self._team.busy:
            return
        left = [place for place in range(max(self._turn, 0), len(self._tasks)) if place not in self._outcomes]
        if left:  # with somebody who has died
            self._attempts = self._attempts + 1 if len(left) == self._left else 0
            self._left = len(left)
            if self._attempts > _ATTEMPTS:
                raise WorkerDiedError(f"worker processes end before they train a client, {_ATTEMPTS} times in a row")
            self._team.stop()
            self._hand_out(left)

    def _mourn(self, index: int, end: str) -> None:
        """A worker has died: its client has failed, the others go on."""
        place = int(self._places[index])
        if place != STOP and place >= self._turn and place not in self._outcomes:
            self._outcomes[place] = ClientResult(place, error=WorkerDiedError(f"its worker process {end}"))

    def _go_on_alone(self, reason: str) -> None:
        """Trains this client and all that follow in this process; those handed over have left no such trace."""
        self._discard()
        self._alone, self._bench.detour = True, reason
        rank_zero_info(f"Parallel trains this fit's clients one after the other from now on: {reason}")

    def _accept(self, task: ClientTask, outcome: ClientResult) -> Upload:
        """Lets everything happen here that happened in the worker."""
        bench = self._bench
        if outcome.asked and bench.loop.global_step != self._begin + self._steps[self._turn - self._order.first]:
            # The client has seen another number of steps than there are.
            if not self._failed:
                self._go_on_alone(
                    "training looks at global_step, which nobody knows before the clients before have trained"
                )
            return bench.visit(task)
        for text, category, filename, line in outcome.warned:
            warnings.warn_explicit(text, category, filename, line, registry=self._warned.setdefault(filename, {}))
        if outcome.counters:  # a worker that died has told nothing
            bench.loop.add_counters(outcome.counters)
        bench.log(outcome.logged)
        if outcome.error is not None:
            self._failed = True
            raise outcome.error from (_WorkerError(outcome.trace) if outcome.trace else None)
        assert outcome.arrival is not None
        assert task.client_id is not None
        bench.rule.put_aside(task.client_id, outcome.aside or {})
        bench.optimizers.put_aside(task.client_id, outcome.optimizers)
        return outcome.arrival


class _WorkerError(Exception):
    """Where in a worker an error came from."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _acts_between_clients(callback: Callback) -> bool:
    """Whether somebody's callback, other than Lightning's and ours, runs before or after a client."""
    for name in ("on_train_batch_start", "on_train_batch_end"):
        hook = getattr(callback, name)
        function = getattr(hook, "__func__", hook)
        if function is not getattr(Callback, name):
            package = (getattr(function, "__module__", None) or "").partition(".")[0]
            if package not in ("lightning", "pytorch_lightning", "fl_lightning"):
                return True
    return False
