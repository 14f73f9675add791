# SPDX-License-Identifier: Apache-2.0
"""What happens in a worker process: rounds arrive, clients are trained, what they left behind is sent."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fl_lightning.algorithms.base import State
from fl_lightning.core.fingerprint import Fingerprint, is_metric
from fl_lightning.core.lightning.epoch_loop import ClientTask
from fl_lightning.core.lightning.fast_log import LogCall
from fl_lightning.executors.parallel import messages as _wire
from fl_lightning.executors.parallel.recorders import LogRecorder, RefusedLogger, WatchedMetrics
from fl_lightning.training.client_runner import ClientRunner

if TYPE_CHECKING:
    from fl_lightning.training.upload import Upload

STOP = -1
_MOMENT = 0.02  # seconds


@dataclass(frozen=True)
class RoundJob:
    """A round, as far as a worker's copies of everything cannot know it; the global parameters lie in shared memory.

    Attributes:
        tasks: the clients.
        first: place of the client whose turn it is.
        steps: optimizer steps that are going to be taken between that client and those after it.
        standing: where the fit is, see :meth:`FederatedEpochLoop.standing`.
        last: index of the round's last place.
        buffers: the module's global buffers.
        options: of the optimizers.
        schedulers: states of the learning-rate schedulers.
        lr: the clients' learning rate.
        momentum: of the clients' SGD.
    """

    tasks: list[ClientTask]
    first: int
    steps: list[int]
    standing: dict[str, Any]
    last: int
    buffers: Any
    options: list[list[dict[str, Any]]]
    schedulers: list[dict[str, Any]]
    lr: float | None
    momentum: float


@dataclass
class ClientResult:
    """What a client left behind in a worker.

    Attributes:
        place: of its task among the round's tasks.
        arrival: what it sends; its row lies in shared memory.
        error: what its training raised.
        trace: where, in words.
        counters: by how much the loop's counters moved.
        asked: somebody asked for the number of optimizer steps so far.
        logged: its calls of ``self.log``.
        aside: what the rule needs for its commit.
        optimizers: optimizer states to keep.
        warned: warnings as text, category, file and line.
        changed: why it may not be trained here: objects in the parent would miss a change.
    """

    place: int
    arrival: Upload | None = None
    error: BaseException | None = None
    trace: str = ""
    counters: list[dict[str, int]] = field(default_factory=list)
    asked: bool = False
    logged: list[LogCall] = field(default_factory=list)
    aside: State | None = None
    optimizers: list[dict[str, Any]] | None = None
    warned: list[tuple[str, type[Warning], str, int]] = field(default_factory=list)
    changed: str = ""


@dataclass(frozen=True)
class WorkerReady:
    """A worker is there; ``obstacle`` says why it cannot train."""

    obstacle: str = ""


@dataclass(frozen=True)
class RoundDone:
    """A worker's share of a round is over; ``frozen`` says if parameters without gradients have changed."""

    frozen: str = ""


class Worker:
    """Trains clients on a copy of the parent's bench.

    Args:
        bench: the copy.
        theta: shared memory with the global parameters of a round.
        current: shared memory, one number: the place that is in training.
        channel: to the parent.
        tokens: file descriptor from which places are read, shared by all workers.
    """

    def __init__(self, bench: ClientRunner, theta: Tensor, current: Tensor, channel: Connection, tokens: int) -> None:
        self._bench, self._theta, self._current = bench, theta, current
        self._channel, self._tokens = channel, tokens
        self._recorder = LogRecorder(bench.module, bench.loop)
        bench.local.take_log(self._recorder)
        self._loggers = [RefusedLogger() for _ in bench.trainer.loggers]
        bench.trainer.loggers = self._loggers  # type: ignore[assignment]
        self._wires: list[WatchedMetrics] = bench.loop.replace_metrics(WatchedMetrics)
        self._warned: list[tuple[str, type[Warning], str, int]] = []
        warnings.showwarning = self._warn  # type: ignore[assignment]
        self._broken = False
        self._before = Fingerprint()
        self._held: list[ClientResult] = []
        self._sent = 0.0

    def serve(self) -> None:
        """Trains clients until the parent is gone."""
        _wire.send(self._channel, WorkerReady(can_train()))
        self._before = self._fingerprint()
        while True:
            order: RoundJob = _wire.receive(self._channel)
            self._adopt(order)
            self._sent = time.perf_counter()
            while (place := self._next()) != STOP:
                self._current.fill_(place)
                # Once something has changed here, clients would not be what they are in the parent.
                if not self._broken:
                    self._finish(self._train(order, place))
                self._current.fill_(STOP)
            self._send()
            _wire.send(self._channel, RoundDone(self._frozen()))

    def _adopt(self, order: RoundJob) -> None:
        bench = self._bench
        bench.binding.theta.copy_(self._theta)
        bench.server.bank.load_state(order.buffers)
        bench.optimizers.load_options(order.options)
        for config, state in zip(bench.trainer.lr_scheduler_configs, order.schedulers, strict=True):
            config.scheduler.load_state_dict(state)
            self._before = self._fingerprint()
        bench.lr, bench.momentum = order.lr, order.momentum

    def _next(self) -> int:
        token = os.read(self._tokens, 4)
        if len(token) < 4:
            raise EOFError
        return int.from_bytes(token, "little", signed=True)

    def _fingerprint(self) -> Fingerprint:
        trainer, found = self._bench.trainer, Fingerprint()
        found.add_module(self._bench.module, metrics=True)
        found.add("trainer.should_stop", trainer.should_stop)
        for index, config in enumerate(trainer.lr_scheduler_configs):
            found.add(f"lr_scheduler_configs[{index}]", config.scheduler.state_dict())
        return found

    def _train(self, order: RoundJob, place: int) -> ClientResult:
        bench, loop, task = self._bench, self._bench.loop, order.tasks[place]
        outcome, recorder = ClientResult(place), self._recorder
        later, steps = task.index - order.tasks[order.first].index, order.steps[place - order.first]
        loop.stand_at(order.standing, later, steps, task.index == order.last)
        before = loop.counters()
        loop.asked_for_steps, recorder.calls, recorder.metric, self._warned = False, [], "", []
        try:
            outcome.arrival = bench.visit(task)
            assert task.client_id is not None
            outcome.aside = bench.rule.take_aside(task.client_id)
            outcome.optimizers = bench.optimizers.take_aside(task.client_id)
        except BaseException as error:
            outcome.error, outcome.trace = _portable(error), traceback.format_exc()
            bench.binding.thaw()
        finally:
            outcome.asked = loop.asked_for_steps
            bench.tidy()
            bench.optimizers.forget_aside()
        after = loop.counters()
        # Most of them stay at zero.
        outcome.counters = [{n: b[n] - a[n] for n in a if b[n] != a[n]} for a, b in zip(before, after, strict=True)]
        outcome.logged, outcome.warned = recorder.calls, self._warned
        outcome.changed = recorder.metric or self._changes()
        return outcome

    def _changes(self) -> str:
        if any(logger.touched for logger in self._loggers):
            return "uses a logger directly"
        if any(wire.touched for wire in self._wires):
            return "looks at the trainer's metrics"
        before, self._before = self._before, self._fingerprint()
        names = before.changes(self._before)
        if not names:
            return ""
        return f"changes {'metric' if is_metric(self._bench.module, names[0]) else 'attribute'} {names[0]!r}"

    def _finish(self, outcome: ClientResult) -> None:
        """Sends the outcome now, or with the next if clients take a moment only: the parent shares the processors."""
        self._held.append(outcome)
        self._broken = bool(outcome.changed)
        if self._broken or outcome.error is not None or time.perf_counter() - self._sent > _MOMENT:
            self._send()

    def _send(self) -> None:
        held, self._held, self._sent = self._held, [], time.perf_counter()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        for outcome in held:
            try:
                _wire.send(self._channel, outcome)
            except (pickle.PicklingError, TypeError, AttributeError) as error:  # noqa: PERF203
                self._broken = True
                reason = f"leaves something behind that cannot be sent to another process ({error})"
                _wire.send(self._channel, ClientResult(outcome.place, changed=reason))

    def _frozen(self) -> str:
        try:
            self._bench.binding.check_frozen()
        except ValueError as error:
            return str(error)
        return ""

    def _warn(self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        self._warned.append((str(message), category, filename, lineno))


def _portable(error: BaseException) -> BaseException:
    """The error itself if it survives being sent, else one of the same name and message."""
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def can_train() -> str:
    """Why backward passes fail in a copy of this process, if they do."""
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error)
    return ""
