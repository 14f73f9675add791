# SPDX-License-Identifier: Apache-2.0
"""The clients of a round divided among the processes of a fit (``Trainer(devices=8, num_nodes=2)``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from fl_lightning.clients.base import CohortExecutor, CohortRunner
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.client_runner import ClientRunner
from fl_lightning.clients.ranks.column_rows import ColumnRows, ColumnState, RowExchange, SentRows
from fl_lightning.clients.update_rows import UpdateRows, Upload
from fl_lightning.clients.visits import OutcomeReplayer, VisitOutcome, VisitRecorder, portable
from fl_lightning.core.errors import ModuleError, RankError
from fl_lightning.core.processes import balanced_split
from fl_lightning.core.updates import Columns
from fl_lightning.lightning.batches import ClientTask
from fl_lightning.lightning.inspection import users_callback
from fl_lightning.lightning.names import Callback
from fl_lightning.lightning.ranks import Ranks


@dataclass(frozen=True)
class Ranked(CohortExecutor):
    """Every rank trains some of a round's clients; the strategy uses it if a trainer has several processes."""

    ranks: Ranks
    columns: Columns
    state: ColumnState | None = None

    def update_rows(self, binding: BoundParameters, capacity: int) -> UpdateRows:
        """The columns of this process."""
        return ColumnRows(binding, capacity, self.columns)

    def runner(self, clients: ClientRunner) -> CohortRunner:
        """Of this process."""
        spans, total = self.columns.spans, (0, self.columns.total)
        spans = [total] * self.ranks.size if len(spans) == 1 else spans
        assert isinstance(clients.rows, ColumnRows)
        return RankedRunner(clients, self.ranks, RowExchange(self.ranks, clients.rows, spans), self.state)


class RankedRunner(CohortRunner):
    """Trains this rank's clients of a round when the first is asked for, and repeats all of them in cohort order.

    The longest clients are trained first, and whoever is free takes the next. Where the client rule keeps something
    about each client in columns, it must be brought to the client before, so clients are assigned beforehand. Which
    rank trains a client has no effect on any result, because a client's randomness depends on (seed, round, client)
    alone.
    """

    def __init__(
        self, clients: ClientRunner, ranks: Ranks, exchange: RowExchange, state: ColumnState | None = None
    ) -> None:
        self._clients, self._ranks, self._exchange, self._state = clients, ranks, exchange, state
        self._recorder, self._replayer = VisitRecorder(clients), OutcomeReplayer(clients)
        self._tasks, self._current = list[ClientTask](), -1
        callbacks: list[Callback] = clients.trainer.callbacks  # type: ignore[attr-defined]
        self._between = users_callback(callbacks, "on_train_batch_start", "on_train_batch_end")

    def begin_round(self, tasks: Sequence[ClientTask]) -> None:
        """Training begins when the first client is asked for."""
        self._tasks, self._current = list(tasks), -1
        self._outcomes: dict[int, VisitOutcome] = {}

    def train(self, task: ClientTask) -> Upload:
        """Repeats the next client here; the first call trains this rank's clients and waits for the others."""
        self._current += 1
        if self._current == 0:
            self._train_own()
        elif self._between is not None:
            self._check_between(self._between)
        return self._replayer.replay(task, self._outcomes.pop(self._current))

    def _train_own(self) -> None:
        ranks, left = self._ranks, list(range(len(self._tasks)))
        while left:
            everyones = ranks.gather(self._trained(left))
            self._exchange.complete([[sent for _, sent in theirs if sent is not None] for theirs in everyones])
            outcomes = [outcome for theirs in everyones for outcome, _ in theirs]
            for outcome in sorted(outcomes, key=lambda outcome: outcome.place):
                if isinstance(outcome.error, ModuleError):
                    raise RankError(
                        f"client {self._tasks[outcome.place].client_id}: {outcome.error}"
                    ) from outcome.error
                self._outcomes[outcome.place] = outcome
            left = [place for place in left if place not in self._outcomes]  # by whoever was asked to stop
            ranks.follow_requests(between_clients=bool(left))
        if self._between is not None:
            self._clients.isolation.take_snapshot()  # a rank may have trained nobody
            self._trained_on = self._clients.global_params.clone()

    def _trained(self, left: Sequence[int]) -> list[tuple[VisitOutcome, SentRows | None]]:
        """This rank's clients of those at some places, and what it has sent of each one's rows."""
        own: list[tuple[VisitOutcome, SentRows | None]] = []
        self._exchange.begin()
        with self._recorder.recording():
            for place in self._places(left):
                outcome = self._recorder.visit(self._tasks[place], place)
                if outcome.error is not None and not isinstance(outcome.error, Exception):
                    raise outcome.error
                own.append(self._sent(outcome))
        return own

    def _sent(self, outcome: VisitOutcome) -> tuple[VisitOutcome, SentRows | None]:
        """Lets the rows of a client travel, and what it left behind apart from them."""
        upload = outcome.upload
        if upload is None:
            return outcome, None
        sent = self._exchange.send(upload.index, upload.report.companions)
        return replace(outcome, upload=replace(upload, report=replace(upload.report, companions={}))), sent

    def _places(self, left: Sequence[int]) -> Iterable[int]:
        """The places of the clients that this rank trains, as it becomes free for them."""
        ranks, tasks = self._ranks, self._tasks
        costs = {place: self._clients.expected_cost(tasks[place]) for place in left}

        def longest_first(places: Iterable[int]) -> list[int]:
            return sorted(places, key=lambda place: (-costs[place], place))

        if self._state is None:
            return ranks.claims(longest_first(left))
        parts = balanced_split([costs[place] + 1 for place in left], ranks.size)  # those without a step train, too
        owners = {left[number]: rank for rank, part in enumerate(parts) for number in part}
        clients = {place: tasks[place].client_id for place in left}
        self._state.hand_out({client: owners[place] for place, client in clients.items() if client is not None})
        return ranks.until_asked(longest_first(place for place in left if owners[place] == ranks.rank))

    def losses(self, clients: Sequence[int], measure: Callable[[int], float]) -> list[float]:
        """See :meth:`CohortRunner.losses`; each rank measures some."""
        sizes = self._clients.batches.loaders.sizes
        part = balanced_split([int(sizes[client]) for client in clients], self._ranks.size)[self._ranks.rank]
        found, error = list[float](), None
        try:
            found = super().losses([clients[place] for place in part], measure)
        except Exception as raised:
            error = portable(raised)
        losses = dict[int, float]()
        for places, theirs, wrong in self._ranks.gather((part, found, error)):
            if wrong is not None:
                raise wrong
            losses |= zip(places, theirs, strict=True)
        return [losses[place] for place in range(len(clients))]

    def _check_between(self, callback: Callback) -> None:
        """Clients that are yet to be repeated have been trained already."""
        names = self._clients.isolation.changed()
        if not torch.equal(self._trained_on, self._clients.global_params):
            names.insert(0, "the parameters")
        if names:
            raise RankError(
                f"{type(callback).__name__} changes {names[0]!r} of the module between the clients of a round, all of "
                "which the ranks have trained before: change it in on_train_epoch_start or on_train_epoch_end, or use "
                "one process (Trainer(devices=1))"
            )
