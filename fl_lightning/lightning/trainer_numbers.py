# SPDX-License-Identifier: Apache-2.0
"""What a Trainer in a federated fit says about batches and steps: a client's, except to progress bars."""

from __future__ import annotations

from functools import cache
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from fl_lightning.lightning.names import Trainer, callbacks, rank_zero_info
from fl_lightning.lightning.round_clock import VisitClock

_Trainer: Any = Trainer if TYPE_CHECKING else object


class _VisitTrainer(_Trainer):  # type: ignore[misc]
    """Comes before the trainer's own class: both numbers are properties there, so no attribute can replace them."""

    @property
    def _clock(self) -> VisitClock:
        return self.fit_loop.epoch_loop.clock  # type: ignore[no-any-return]

    @property
    def num_training_batches(self) -> int | float:
        """Batches of a client's visit, over all local epochs: mean over the clients, rounded up."""
        return self._clock.shown_batches

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Ticks of the fit: those of a round, times the rounds that ``max_epochs`` and ``max_steps`` leave.

        Raises:
            ValueError: nobody has said how many rounds there are.
        """
        if self.max_epochs == -1 and self.max_steps == -1:
            return inf
        if self.train_dataloader is None:
            rank_zero_info("Loading `train_dataloader` to estimate number of stepping batches.")
            self.fit_loop.setup_data()
        if self._clock.endless:
            raise ValueError(self._clock.endless)
        plan = self._clock.plan
        if plan is None:
            estimate: int | float = super().estimated_stepping_batches
            return estimate
        rounds: float = inf if self.max_epochs == -1 else max(self.max_epochs, 1)
        if self.max_steps != -1:
            rounds = min(rounds, ceil(self.max_steps / plan.steps))
        return plan.steps * int(rounds)


class _CohortBar:
    """Comes before a progress bar's own class: its steps are clients."""

    @property
    def total_train_batches(self) -> int | float:
        """Clients of a round."""
        return self.trainer.fit_loop.max_batches  # type: ignore[attr-defined,no-any-return]


def count_visits(trainer: Trainer) -> None:
    """Lets a trainer with a federated epoch loop show the numbers of visits, and its progress bars those of cohorts."""
    _put_before(trainer, _VisitTrainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        own = getattr(type(callback), "total_train_batches", None)
        if own is not None and own is getattr(callbacks.ProgressBar, "total_train_batches", None):
            _put_before(callback, _CohortBar)


def _put_before(thing: Any, first: type) -> None:
    own: Any = type(thing)
    if not issubclass(own, first):
        thing.__class__ = _joined(first, own)


@cache
def _joined(first: type, own: Any) -> type:
    """A class of the same name with the first one's properties."""
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(own.__name__, (first, own), names)
