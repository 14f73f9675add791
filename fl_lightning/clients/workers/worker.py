# SPDX-License-Identifier: Apache-2.0
"""What happens in a worker process: clients of a round are trained, and what they leave behind is sent."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from fl_lightning.clients.client_runner import ClientRunner
from fl_lightning.clients.visits import Outcome, Visits
from fl_lightning.clients.workers import process
from fl_lightning.clients.workers.process import STOP, RoundDone, WorkerReady
from fl_lightning.core.errors import ModuleError
from fl_lightning.lightning.batches import ClientTask

_MOMENT = 0.02  # seconds


class Worker:
    """Trains clients on a copy of the parent's fit."""

    def __init__(
        self,
        clients: ClientRunner,
        tasks: Sequence[ClientTask],
        current: Tensor,  # shared memory, one number: the place that is in training
        since: Tensor,  # shared memory, one number: when that began, by ``time.monotonic()``
        channel: Connection,  # to the parent
        tokens: int,  # file descriptor from which places are read, shared by all workers
    ) -> None:
        self._clients, self._tasks, self._current, self._since = clients, tasks, current, since
        self._channel, self._tokens = channel, tokens
        self._held: list[Outcome] = []
        self._sent = 0.0

    def serve(self) -> None:
        """Trains clients until none is left."""
        obstacle = can_train()
        process.send(self._channel, WorkerReady(obstacle))
        if obstacle:
            return
        visits = Visits(self._clients)
        self._sent = time.perf_counter()
        with visits.recording():
            while (place := self._next()) != STOP:
                self._turn_to(place)
                self._finish(visits.visit(self._tasks[place], place))
                self._turn_to(STOP)
        self._send()
        process.send(self._channel, RoundDone(self._flaw()))

    def _turn_to(self, place: int) -> None:
        self._since.fill_(time.monotonic())
        self._current.fill_(place)

    def _next(self) -> int:
        token = os.read(self._tokens, 4)
        if len(token) < 4:
            raise EOFError
        return int.from_bytes(token, "little", signed=True)

    def _finish(self, outcome: Outcome) -> None:
        """Sends it now, or with the next if clients take a moment only: the parent shares the processors."""
        self._held.append(outcome)
        if outcome.error is not None or time.perf_counter() - self._sent > _MOMENT:
            self._send()

    def _send(self) -> None:
        held, self._held, self._sent = self._held, [], time.perf_counter()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        for outcome in held:
            try:
                process.send(self._channel, outcome)
            except (pickle.PicklingError, TypeError, AttributeError) as error:  # noqa: PERF203
                reason = f"what clients log or send must be something that can be pickled, found {error}"
                failed = ModuleError(f"{reason}: use executor=Sequential()")
                process.send(self._channel, Outcome(outcome.place, error=failed))

    def _flaw(self) -> str:
        try:
            self._clients.check_round()
        except ValueError as error:
            return str(error)
        return ""


def can_train() -> str:
    """Why backward passes fail in a copy of this process, if they do."""
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error)
    return ""
