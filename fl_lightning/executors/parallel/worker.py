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
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.fingerprint import Fingerprint, is_metric
from fl_lightning.core.lightning.epoch_loop import ClientTask
from fl_lightning.core.lightning.process_copy import replace_metrics
from fl_lightning.executors.parallel import messages
from fl_lightning.executors.parallel.recorders import LogRecorder, RefusedLogger, WatchedMetrics
from fl_lightning.training.client_runner import ClientRunner
from fl_lightning.training.process_copies import ClientTraces, RoundState
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
        last: index of the round's last place.
        state: where the fit is when that client is about to train.
    """

    tasks: list[ClientTask]
    first: int
    steps: list[int]
    last: int
    state: RoundState


@dataclass
class ClientResult:
    """What became of a client in a worker.

    Attributes:
        place: of its task among the round's tasks.
        upload: what it sends; its row lies in shared memory.
        traces: what it left behind beside that; ``None`` if its worker died.
        error: what its training raised.
        trace: where, in words.
        asked: training read the number of optimizer steps so far.
        warned: warnings as text, category, file and line.
        changed: why the parent must train it again: its training changed an object that the parent does not share.
    """

    place: int
    upload: Upload | None = None
    traces: ClientTraces | None = None
    error: BaseException | None = None
    trace: str = ""
    asked: bool = False
    warned: list[tuple[str, type[Warning], str, int]] = field(default_factory=list)
    changed: str = ""


@dataclass(frozen=True)
class WorkerReady:
    """A worker has started; ``obstacle`` says why it cannot train, if so."""

    obstacle: str = ""


@dataclass(frozen=True)
class RoundDone:
    """A worker's share of a round is over; ``frozen`` says if parameters without gradients have changed."""

    frozen: str = ""


class Worker:
    """Trains clients on a copy of the parent's fit.

    Args:
        clients: the copy of what trains clients.
        params: shared memory with the global parameters of a round.
        current: shared memory, one number: the place that is in training.
        channel: to the parent.
        tokens: file descriptor from which places are read, shared by all workers.
    """

    def __init__(
        self, clients: ClientRunner, params: Tensor, current: Tensor, channel: Connection, tokens: int
    ) -> None:
        self._clients, self._params, self._current = clients, params, current
        self._channel, self._tokens = channel, tokens
        self._log = LogRecorder(clients.module)
        clients.copies.record_log(self._log)
        self._loggers = [RefusedLogger() for _ in clients.trainer.loggers]
        clients.trainer.loggers = self._loggers  # type: ignore[assignment]
        self._metrics: list[WatchedMetrics] = replace_metrics(clients.trainer, WatchedMetrics)
        self._warned: list[tuple[str, type[Warning], str, int]] = []
        warnings.showwarning = self._warn  # type: ignore[assignment]
        self._broken = False
        self._before = Fingerprint()
        self._held: list[ClientResult] = []
        self._sent = 0.0

    def serve(self) -> None:
        """Trains clients until the parent is gone."""
        messages.send(self._channel, WorkerReady(can_train()))
        self._before = self._fingerprint()
        while True:
            job: RoundJob = messages.receive(self._channel)
            self._clients.copies.load_round_state(job.state, self._params)
            if job.state.schedulers:
                self._before = self._fingerprint()
            self._sent = time.perf_counter()
            while (place := self._next()) != STOP:
                self._current.fill_(place)
                # Once something has changed here, clients would not be what they are in the parent.
                if not self._broken:
                    self._finish(self._train(job, place))
                self._current.fill_(STOP)
            self._send()
            messages.send(self._channel, RoundDone(self._frozen()))

    def _next(self) -> int:
        token = os.read(self._tokens, 4)
        if len(token) < 4:
            raise EOFError
        return int.from_bytes(token, "little", signed=True)

    def _fingerprint(self) -> Fingerprint:
        trainer, found = self._clients.trainer, Fingerprint()
        found.add_module(self._clients.module, metrics=True)
        found.add("trainer.should_stop", trainer.should_stop)
        for index, config in enumerate(trainer.lr_scheduler_configs):
            found.add(f"lr_scheduler_configs[{index}]", config.scheduler.state_dict())
        return found

    def _train(self, job: RoundJob, place: int) -> ClientResult:
        clients, counters, task, log = self._clients, self._clients.copies.counters, job.tasks[place], self._log
        assert task.client_id is not None
        result = ClientResult(place)
        later, steps = task.index - job.tasks[job.first].index, job.steps[place - job.first]
        counters.move_to(job.state.counters, later, steps, task.index == job.last)
        before = counters.counts()
        counters.asked_for_steps, log.calls, log.metric, self._warned = False, [], "", []
        try:
            result.upload = clients.train(task)
            result.traces = clients.copies.traces_of(task.client_id, before, log.calls, failed=False)
        except BaseException as error:
            result.error, result.trace = _portable(error), traceback.format_exc()
            result.traces = clients.copies.traces_of(task.client_id, before, log.calls, failed=True)
        finally:
            result.asked = counters.asked_for_steps
            clients.restore(failed=result.error is not None)
        result.warned = self._warned
        result.changed = log.metric or self._changes()
        return result

    def _changes(self) -> str:
        if any(logger.touched for logger in self._loggers):
            return "uses a logger directly"
        if any(metrics.touched for metrics in self._metrics):
            return "looks at the trainer's metrics"
        before, self._before = self._before, self._fingerprint()
        names = before.changes(self._before)
        if not names:
            return ""
        return f"changes {'metric' if is_metric(self._clients.module, names[0]) else 'attribute'} {names[0]!r}"

    def _finish(self, result: ClientResult) -> None:
        """Sends the result now, or with the next if clients take a moment only: the parent shares the processors."""
        self._held.append(result)
        self._broken = bool(result.changed)
        if self._broken or result.error is not None or time.perf_counter() - self._sent > _MOMENT:
            self._send()

    def _send(self) -> None:
        held, self._held, self._sent = self._held, [], time.perf_counter()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        for result in held:
            try:
                messages.send(self._channel, result)
            except (pickle.PicklingError, TypeError, AttributeError) as error:  # noqa: PERF203
                self._broken = True
                reason = f"leaves something behind that cannot be sent to another process ({error})"
                messages.send(self._channel, ClientResult(result.place, changed=reason))

    def _frozen(self) -> str:
        try:
            self._clients.check_frozen()
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
