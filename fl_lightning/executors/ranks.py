# SPDX-License-Identifier: Apache-2.0
"""The clients of a round divided among the processes of a fit (``Trainer(devices=8, num_nodes=2)``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fl_lightning.core.errors import RankError
from fl_lightning.core.lightning.epoch_loop import ClientTask
from fl_lightning.core.lightning.inspection import users_callback
from fl_lightning.core.lightning.names import Callback
from fl_lightning.core.lightning.ranks import Ranks
from fl_lightning.executors.base import CohortRunner, Executor
from fl_lightning.training.client_runner import ClientRunner
from fl_lightning.training.upload import Upload
from fl_lightning.training.visits import Outcome, Replays, Visits


@dataclass(frozen=True)
class Ranked(Executor):
    """Every rank trains a share of a round's clients; the strategy uses it if a trainer has several processes.

    Args:
        ranks: the processes.
    """

    ranks: Ranks

    def runner(self, clients: ClientRunner) -> CohortRunner:
        """Of this process."""
        return RankedRunner(clients, self.ranks)


class RankedRunner(CohortRunner):
    """Trains this rank's clients of a round when the first is asked for, and repeats all of them in cohort order.

    The longest clients are trained first, and whoever is free takes the next. Which rank trains a client has no effect
    on any result, because a client's randomness depends on (seed, round, client) alone.

    Args:
        clients: trains single clients.
        ranks: the processes.
    """

    def __init__(self, clients: ClientRunner, ranks: Ranks) -> None:
        self._clients, self._ranks = clients, ranks
        self._visits, self._replays = Visits(clients), Replays(clients)
        callbacks: list[Callback] = clients.trainer.callbacks  # type: ignore[attr-defined]
        self._between = users_callback(callbacks, "on_train_batch_start", "on_train_batch_end")
        self.begin_round([])

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
        elif self._between is not None:
            self._check_between(self._between)
        return self._replays.replay(self._outcomes.pop(self._turn))

    def _train_share(self) -> None:
        clients, ranks = self._clients, self._ranks
        costs = [clients.planned_cost(task) for task in self._tasks]
        left = sorted(range(len(costs)), key=lambda place: (-costs[place], place))  # the longest first
        while left:
            for rank, outcomes in enumerate(ranks.gather(self._trained(left))):
                for outcome in sorted(outcomes, key=lambda outcome: outcome.place):
                    self._take(outcome, rank)
            left = [place for place in left if place not in self._outcomes]  # by whoever was asked to stop
            ranks.follow_requests(between_clients=bool(left))
        if self._between is not None:
            self._trained_on = self._replays.present(), clients.global_params.clone()

    def _trained(self, places: Sequence[int]) -> list[Outcome]:
        """This rank's share of the clients at some places."""
        own: list[Outcome] = []
        with self._visits.recording():
            self._visits.begin_round(self._replays.begin_round(self._tasks))
            for place in self._ranks.claims(places):
                own.append(self._visited(place))
                error = own[-1].error
                if error is not None and not isinstance(error, Exception):
                    raise error
        return own

    def _visited(self, place: int) -> Outcome:
        outcome = self._visits.visit(place)
        while outcome.changed and self._replays.learn(outcome):  # a list in which clients gather: it is watched now
            self._visits.begin_round(self._replays.begin_round(self._tasks))
            outcome = self._visits.visit(place)
        return outcome

    def _check_between(self, callback: Callback) -> None:
        """Clients that are yet to be repeated have been trained already."""
        objects, params = self._trained_on
        names = objects.changes(self._replays.present())
        if not torch.equal(params, self._clients.global_params):
            names.insert(0, "the parameters")
        if names:
            raise RankError(
                f"{type(callback).__name__} changes {names[0]!r} of the module between the clients of a round, all of "
                "which the ranks have trained before: change it in on_train_epoch_start or on_train_epoch_end, or use "
                "one process (Trainer(devices=1))"
            )

    def _take(self, outcome: Outcome, rank: int) -> None:
        """Receives a client's update, or hears that it may not be trained on one rank alone."""
        task = self._tasks[outcome.place]
        if outcome.changed:
            raise RankError(
                f"training client {task.client_id} {outcome.changed}, which the other ranks would not see: log it with "
                "self.log, or use one process (Trainer(devices=1))"
            )
        if outcome.error is None:
            self._ranks.send_row(self._clients.rows.values[task.index], rank)
        self._outcomes[outcome.place] = outcome
