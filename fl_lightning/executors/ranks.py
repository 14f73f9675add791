# SPDX-License-Identifier: Apache-2.0
"""The clients of a round divided among the processes of a fit (``Trainer(devices=8, num_nodes=2)``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fl_lightning.core.columns import Columns
from fl_lightning.core.errors import RankError
from fl_lightning.core.fair_shares import fair_shares
from fl_lightning.core.lightning.epoch_loop import ClientTask
from fl_lightning.core.lightning.ranks import Ranks
from fl_lightning.executors.base import CohortRunner, Executor
from fl_lightning.executors.column_rows import ColumnRows, RowExchange, SentRows
from fl_lightning.executors.column_state import ColumnState
from fl_lightning.training.bound_parameters import BoundParameters
from fl_lightning.training.client_runner import ClientRunner
from fl_lightning.training.update_rows import UpdateRows
from fl_lightning.training.upload import Upload
from fl_lightning.training.visits import Outcome, Replays, Visits, portable


@dataclass(frozen=True)
class Ranked(Executor):
    """Every rank trains a share of a round's clients; the strategy uses it if a trainer has several processes.

    Args:
        ranks: the processes.
        columns: of the updates, that this process holds.
        state: hands out what the client rule keeps in columns, if it does.
    """

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

    Args:
        clients: trains single clients.
        ranks: the processes.
        exchange: of the clients' rows.
        state: of the client rule, where it lies in columns.
    """

    def __init__(
        self, clients: ClientRunner, ranks: Ranks, exchange: RowExchange, state: ColumnState | None = None
    ) -> None:
        self._clients, self._ranks, self._exchange, self._state = clients, ranks, exchange, state
        self._visits, self._replays = Visits(clients), Replays(clients)
        self._tasks, self._turn = list[ClientTask](), -1

    def begin_round(self, tasks: Sequence[ClientTask]) -> None:
        """Training begins when the first client is asked for."""
        self._tasks, self._turn = list(tasks), -1
        self._outcomes: dict[int, Outcome] = {}

    def train(self, task: ClientTask) -> Upload:
        """Repeats the next client here; the first call trains this rank's share and waits for the others.

        Raises:
            RankError: another process has ended, or training leaves something behind that stays in one process.
        """
        self._turn += 1
        if self._turn == 0:
            self._train_share()
        return self._replays.replay(self._outcomes.pop(self._turn))

    def _train_share(self) -> None:
        ranks, exchange = self._ranks, self._exchange
        order = self._replays.begin_round(self._tasks)
        exchange.begin_round()
        places = self._places()
        own, sent = list[Outcome](), list[SentRows]()
        with self._visits.recording():
            self._visits.begin_round(order)
            for place in places:
                outcome = self._visited(place)
                if outcome.error is not None and not isinstance(outcome.error, Exception):
                    raise outcome.error
                if outcome.upload is not None and not outcome.changed:
                    report = outcome.upload.report
                    sent.append(exchange.send(outcome.upload.index, report.companions))
                    outcome = replace(
                        outcome, upload=replace(outcome.upload, report=replace(report, companions={}))
                    )  # companions travel with the rows
                own.append(outcome)
        everyones = ranks.gather((own, sent))
        exchange.complete([theirs for _, theirs in everyones])
        for outcome in sorted((outcome for outcomes, _ in everyones for outcome in outcomes), key=lambda o: o.place):
            self._check(outcome)
            self._outcomes[outcome.place] = outcome

    def _places(self) -> Iterable[int]:
        """The places of the clients that this rank trains, as it becomes free for them."""
        ranks, costs = self._ranks, [self._clients.planned_cost(task) for task in self._tasks]

        def longest_first(places: Iterable[int]) -> list[int]:
            return sorted(places, key=lambda place: (-costs[place], place))

        if self._state is None:
            return ranks.claims(longest_first(range(len(costs))))
        shares = fair_shares([cost + 1 for cost in costs], ranks.size)  # those without a step train, too
        owners = {place: rank for rank, share in enumerate(shares) for place in share}
        clients = [task.client_id for task in self._tasks if task.client_id is not None]
        self._state.hand_out(clients, [owners[place] for place in range(len(costs))])
        return longest_first(shares[ranks.rank])

    def losses(self, clients: Sequence[int], measure: Callable[[int], float]) -> list[float]:
        """See :meth:`CohortRunner.losses`; each rank measures a share."""
        sizes = self._clients.batches.loaders.sizes
        share = fair_shares([int(sizes[client]) for client in clients], self._ranks.size)[self._ranks.rank]
        found, error = list[float](), None
        try:
            found = super().losses([clients[place] for place in share], measure)
        except Exception as raised:
            error = portable(raised)
        losses = dict[int, float]()
        for places, theirs, wrong in self._ranks.gather((share, found, error)):
            if wrong is not None:
                raise wrong
            losses |= zip(places, theirs, strict=True)
        return [losses[place] for place in range(len(clients))]

    def _visited(self, place: int) -> Outcome:
        outcome = self._visits.visit(place)
        while outcome.changed and self._replays.learn(outcome):  # a list in which clients gather: it is watched now
            self._visits.begin_round(self._replays.begin_round(self._tasks))
            outcome = self._visits.visit(place)
        return outcome

    def _check(self, outcome: Outcome) -> None:
        if outcome.changed:
            raise RankError(
                f"training client {self._tasks[outcome.place].client_id} {outcome.changed}, which the other ranks "
                "would not see: log it with self.log, or use one process (Trainer(devices=1))"
            )
