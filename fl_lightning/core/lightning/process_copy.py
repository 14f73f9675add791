# SPDX-License-Identifier: Apache-2.0
"""What the copy of a fit in another process must know of Lightning's counters and metrics, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fl_lightning.core.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.core.lightning.names import Trainer

_T = TypeVar("_T")
Counts = list[dict[str, int]]
"""How often local training has stepped, one dictionary per tracker of Lightning."""


class LoopCounters:
    """Reads and moves the counters of an epoch loop.

    Args:
        loop: the loop.
    """

    def __init__(self, loop: FederatedEpochLoop) -> None:
        self._loop = loop

    @property
    def asked_for_steps(self) -> bool:
        """Whether the number of optimizer steps so far was read since this was set to False."""
        return self._loop.asked_for_steps

    @asked_for_steps.setter
    def asked_for_steps(self, asked: bool) -> None:
        self._loop.asked_for_steps = asked

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return self._loop.global_step

    def counts(self) -> Counts:
        """How often local training has stepped, as Lightning counts it."""
        return [dict(vars(tracker)) for tracker in self._trackers()]

    def counts_since(self, before: Counts) -> Counts:
        """The differences to an earlier :meth:`counts`, without zeros."""
        return [{n: b[n] - a[n] for n in a if b[n] != a[n]} for a, b in zip(before, self.counts(), strict=True)]

    def add(self, counts: Sequence[Mapping[str, int]]) -> None:
        """Adds differences of :meth:`counts`."""
        for tracker, added in zip(self._trackers(), counts, strict=True):
            for name, number in added.items():
                setattr(tracker, name, getattr(tracker, name) + number)

    def state(self) -> dict[str, Any]:
        """Everything that tells how far the fit is, for the loop's copy in another process."""
        loop = self._loop
        return {
            "epochs": loop.trainer.fit_loop.epoch_progress.state_dict(),
            "batches": loop.batch_progress.state_dict(),
            "steps": self.counts(),
        }

    def move_to(self, state: Mapping[str, Any], place: int, steps: int, is_last: bool) -> None:
        """Brings the counters to where they are when a client of the round trains.

        Args:
            state: of another copy of the loop, when the round's first client was about to train.
            place: the client's place after that client, counting empty places.
            steps: optimizer steps since then.
            is_last: whether it is the last client of the round.
        """
        loop = self._loop
        loop.trainer.fit_loop.epoch_progress.load_state_dict(state["epochs"])
        loop.batch_progress.load_state_dict(state["batches"])
        loop.batch_progress.increment_by(place)
        loop.batch_progress.is_last_batch = is_last
        for tracker, counts in zip(self._trackers(), state["steps"], strict=True):
            vars(tracker).update(counts)
            tracker.completed += steps

    def _trackers(self) -> list[Any]:
        automatic = self._loop.automatic_optimization.optim_progress.optimizer
        progresses = (automatic.step, automatic.zero_grad, self._loop.manual_optimization.optim_step_progress)
        return [tracker for progress in progresses for tracker in (progress.total, progress.current)]


def replace_metrics(trainer: Trainer, wrap: Callable[[dict[str, Any]], _T]) -> list[_T]:
    """Puts others in the places of the trainer's dictionaries of metrics; returns them."""
    connector, wrapped = trainer._logger_connector, []
    for name in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics"):
        wrapped.append(wrap(getattr(connector, name)))
        setattr(connector, name, wrapped[-1])
    return wrapped
