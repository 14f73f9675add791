# SPDX-License-Identifier: Apache-2.0
"""What the epoch loop puts into Lightning beside itself: grouped steps, results, numbers of the trainer, a warning."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil, inf
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from fl_lightning.lightning.names import (
    ResultCollection,
    ResultMetric,
    Trainer,
    callbacks,
    lightning_module,
    rank_zero_info,
    rank_zero_warn,
)
from fl_lightning.lightning.round_clock import VisitClock

if TYPE_CHECKING:
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
else:
    _AutomaticOptimization = lightning_module("loops.optimization.automatic")._AutomaticOptimization


class GroupedOptimization(_AutomaticOptimization):
    """Forgets gradients where a group of batches begins.

    Hooks get a batch's place in the visit, and groups begin anew in each pass, so the place does not tell.
    """

    def __init__(self, trainer: Trainer, clock: VisitClock) -> None:
        super().__init__(trainer)
        self._clock = clock

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        if self._skip_backward or not self._clock.opens_group:
            return None

        def zero_grad() -> None:
            self._on_before_zero_grad(optimizer)
            self._optimizer_zero_grad(batch_idx, optimizer)

        return zero_grad


class _SettledResult(ResultMetric):
    """A logged tensor: its parts are all on one device."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and torch.device(args[0]) == self.value.device:
            return self
        return super().to(*args, **kwargs)


class SettledResults(ResultCollection):
    """Lightning's collection, whose tensors are moved only where they are on another device.

    Lightning moves an entry at every call of ``self.log``, which takes ten times as long as all else that it does then.
    """

    def __setitem__(self, key: str, entry: ResultMetric) -> None:
        settles = type(entry) is ResultMetric and entry.is_tensor
        super().__setitem__(key, _SettledResult(entry.meta, True) if settles else entry)  # nothing is in it yet


def settle_results(trainer: Trainer) -> None:
    """Lets the loops of a trainer collect in :class:`SettledResults`; what they hold already is lost."""
    for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop,
                 trainer.test_loop):  # fmt: skip
        loop._results = SettledResults(loop._results.training)


_Trainer: Any = Trainer if TYPE_CHECKING else object


class _VisitTrainer(_Trainer):  # type: ignore[misc]
    """Comes before the trainer's own class: all of these are properties there, so no attribute can replace them."""

    @property
    def _clock(self) -> VisitClock:
        return self.fit_loop.epoch_loop.clock  # type: ignore[no-any-return]

    @property
    def train_dataloader(self) -> Any:
        """The training data as the fit shows them: the loader that Lightning walks over gives clients for batches."""
        loader: Any = super().train_dataloader
        return self._clock.shown_loader if loader is None else getattr(loader, "shown", loader)

    @property
    def num_training_batches(self) -> int | float:
        """Batches of a client's visit, over all local epochs: mean over the clients, rounded up."""
        return self._clock.shown_batches

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Ticks of the fit: those of a round, times the rounds that ``max_epochs`` and ``max_steps`` leave."""
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


_FitLoop: Any = lightning_module("loops.fit_loop")._FitLoop


class _VisitFitLoop(_FitLoop):  # type: ignore[misc]
    """Comes before the fit loop's own class, which sets ``max_batches`` to the number of clients of a round."""

    @property
    def max_batches(self) -> int | float:
        """As ``trainer.num_training_batches``."""
        return self.epoch_loop.clock.shown_batches  # type: ignore[no-any-return]

    @max_batches.setter
    def max_batches(self, clients: int | float) -> None:
        self.epoch_loop.clock.places = clients

    @property
    def done(self) -> bool:
        """A round that a checkpoint has found closed is yet to end its epoch, whatever limit it has reached."""
        return not self._restarting and bool(super().done)

    def setup_data(self) -> None:
        with self.epoch_loop.clock.counting_clients():
            super().setup_data()


class _CohortBar:
    """Comes before a progress bar's own class: its steps are clients."""

    @property
    def total_train_batches(self) -> int | float:
        return self.trainer.fit_loop.epoch_loop.clock.places  # type: ignore[attr-defined,no-any-return]


def count_visits(trainer: Trainer) -> None:
    """Lets a trainer with a federated epoch loop show the numbers of visits, and its progress bars those of cohorts."""
    _put_before(trainer, _VisitTrainer)
    _put_before(trainer.fit_loop, _VisitFitLoop)
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


class StepValues:
    """Warns once of values that most rounds keep from loggers, in place of Lightning's warning of short epochs."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._told = trainer, False

    def warn(self, results: ResultCollection) -> None:
        """Looks at what the clients of a round have logged."""
        trainer = self._trainer
        every, places = trainer.log_every_n_steps, trainer.fit_loop.epoch_loop.clock.places  # type: ignore[attr-defined]
        if self._told or not trainer.loggers or places >= every or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        metas = [entry.meta for entry in results.values()]
        names = sorted({meta.name for meta in metas if meta.on_step and not meta.on_epoch and meta.logger})
        if not names:
            return
        self._told = True
        rank_zero_warn(
            f"log_every_n_steps={every} counts clients, of which a round has {places}: loggers get {', '.join(names)} "
            f"from one in {every} of them. Log with on_epoch=True, or set log_every_n_steps={places} or lower"
        )
