# SPDX-License-Identifier: Apache-2.0
"""What the epoch loop asks of Lightning, and what it puts there beside itself: steps, results, numbers, a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import metadata
from math import ceil, inf
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from fl_lightning.lightning.metric_state import CONTRACT as METRICS
from fl_lightning.lightning.metric_state import lacking
from fl_lightning.lightning.names import (
    TREE,
    ResultCollection,
    ResultMetric,
    Trainer,
    callbacks,
    lightning_module,
    rank_zero_info,
    rank_zero_warn,
)
from fl_lightning.lightning.round_clock import RoundClock

if TYPE_CHECKING:
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
else:
    _FitLoop = lightning_module("loops.fit_loop")._FitLoop
    _AutomaticOptimization = lightning_module("loops.optimization.automatic")._AutomaticOptimization


CONTRACT: dict[str, tuple[str, ...]] = {
    "lightning_module": ("_current_fx_name", "_on_before_batch_transfer"),
    "fit_loop": ("epoch_loop", "epoch_progress", "state_dict", "load_state_dict", "_restarting", "_combined_loader",
        "_should_reload_train_dl", "_data_source", "max_batches", "setup_data"),
    "fit_loop.epoch_loop": (
        "val_loop", "batch_progress", "scheduler_progress", "automatic_optimization", "manual_optimization",
        "_results", "_batches_that_stepped", "_skip_next_val", "_restarting", "_build_kwargs", "update_lr_schedulers",
        "_update_learning_rates",
        "_num_ready_batches_reached", "_should_check_val_epoch", "_should_check_val_fx", "restarting", "max_steps",
        "on_save_checkpoint", "on_load_checkpoint",
    ),
    "fit_loop.epoch_loop.automatic_optimization": (
        "run", "optim_progress", "_make_zero_grad_fn", "_on_before_zero_grad", "_optimizer_zero_grad", "_skip_backward",
    ),
    "fit_loop.epoch_loop.manual_optimization": ("run", "optim_step_progress"),
    "fit_loop.epoch_loop.val_loop": (
        "batch_progress", "_results", "restarting", "_on_evaluation_model_train", "_evaluation_step", "_max_batches",
        "_data_source", "_store_dataloader_outputs",
    ),
    "fit_loop.epoch_loop._results": ("_forked_name",),
    "validate_loop": ("_evaluation_step", "_max_batches", "_results", "_data_source", "_store_dataloader_outputs"),
    "test_loop": ("_evaluation_step", "_max_batches", "_results", "_data_source", "_store_dataloader_outputs"),
    "predict_loop": ("_data_source",),
    "_signal_connector": ("received_sigterm", "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"),
    "strategy": ("_configure_launcher",),
    "_data_connector": ("attach_datamodule", "_datahook_selector"),
    "_logger_connector": (
        "on_batch_start", "on_batch_end", "update_train_step_metrics", "log_metrics", "_callback_metrics",
        "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter", "_current_fx",
    ),
}  # fmt: skip
"""Private and other attributes in use, by the path from the trainer to their owner."""


def check_contract(trainer: Trainer) -> None:
    """Checks that this Lightning still has the private attributes in use, and names those that it lacks."""
    if found := lacking(METRICS):
        version = metadata.version("torchmetrics")
        raise RuntimeError(f"torchmetrics {version} is not supported: it lacks {found}; use torchmetrics 1.4 to 1.9")
    for path, names in CONTRACT.items():
        owner: Any = trainer
        for part in path.split("."):
            owner = getattr(owner, part)
        if owner is None:
            continue  # a trainer without a module yet
        missing = [name for name in names if not hasattr(owner, name)]
        if missing:
            version = lightning_module("").__version__
            raise RuntimeError(
                f"{TREE} {version} is not supported: trainer.{path} lacks {missing}; "
                "fl_lightning was written for lightning 2.5.3 to 2.6"
            )


class GroupedOptimization(_AutomaticOptimization):
    """Forgets gradients where a group of batches begins.

    Hooks get a batch's place in the visit, and groups begin anew in each pass, so the place does not tell.
    """

    def __init__(self, trainer: Trainer, clock: RoundClock) -> None:
        super().__init__(trainer)
        self._clock = clock

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        if self._skip_backward or not self._clock.opens_group:
            return None

        def zero_grad() -> None:
            self._on_before_zero_grad(optimizer)
            self._optimizer_zero_grad(batch_idx, optimizer)

        return zero_grad


class _OneDeviceResult(ResultMetric):
    """A logged tensor: its parts are all on one device."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and torch.device(args[0]) == self.value.device:
            return self
        return super().to(*args, **kwargs)


class OneDeviceResults(ResultCollection):
    """Lightning's collection, whose tensors are moved only where they are on another device.

    Lightning moves an entry at every call of ``self.log``, which takes ten times as long as all else that it does then.
    """

    def __setitem__(self, key: str, entry: ResultMetric) -> None:
        settles = type(entry) is ResultMetric and entry.is_tensor
        super().__setitem__(key, _OneDeviceResult(entry.meta, True) if settles else entry)  # nothing is in it yet


def install_results(trainer: Trainer) -> None:
    """Lets the loops of a trainer collect in :class:`OneDeviceResults`; what they hold already is lost."""
    for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop,
                 trainer.test_loop):  # fmt: skip
        loop._results = OneDeviceResults(loop._results.training)


class FederatedFitLoop(_FitLoop):
    """Lightning's fit loop around rounds: it begins the fit, and shows the numbers of visits."""

    def __init__(self, replaced: _FitLoop) -> None:
        vars(self).update(vars(replaced))
        vars(self).pop("max_batches", None)

    def run(self) -> None:
        """Runs all rounds.

        The fit begins here: a checkpoint's counters come after ``strategy.setup``, data after them, and a fit that has
        nothing left to do has no ``on_train_start``.
        """
        self.setup_data()
        if self._combined_loader is not None:
            self.epoch_loop.begin_fit()
        super().run()

    @property
    def max_batches(self) -> int | float:
        """As ``trainer.num_training_batches``; Lightning sets it to the number of clients of a round."""
        batches: int | float = self.epoch_loop.clock.shown_batches
        return batches

    @max_batches.setter
    def max_batches(self, clients: int | float) -> None:
        self.epoch_loop.clock.places = clients

    @property
    def done(self) -> bool:
        """A round that a checkpoint has found closed is yet to end its epoch, whatever limit it has reached."""
        return not self._restarting and super().done

    def setup_data(self) -> None:
        """Gets the data, with clients for batches."""
        if self._combined_loader is not None and not self._should_reload_train_dl:
            return  # called in every round, and catching warnings makes Python show again what it has shown once
        with self.epoch_loop.clock.counting_clients(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The number of training batches")  # that nothing will be logged
            super().setup_data()


_Trainer: Any = Trainer if TYPE_CHECKING else object


class _VisitTrainer(_Trainer):  # type: ignore[misc]
    """Comes before the trainer's own class: both are properties there."""

    @property
    def train_dataloader(self) -> Any:
        """The training data as the fit shows them: the loader that Lightning walks over gives clients for batches."""
        loader: Any = super().train_dataloader
        clock: RoundClock = self.fit_loop.epoch_loop.clock
        return clock.shown_loader if loader is None else getattr(loader, "shown", loader)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Ticks of the fit: those of a round, times the rounds that ``max_epochs`` and ``max_steps`` leave."""
        if self.max_epochs == -1 and self.max_steps == -1:
            return inf
        if self.train_dataloader is None:
            rank_zero_info("Loading `train_dataloader` to estimate number of stepping batches.")
            self.fit_loop.setup_data()
        clock: RoundClock = self.fit_loop.epoch_loop.clock
        if clock.endless:
            raise ValueError(clock.endless)
        if clock.mean_visit is None:
            estimate: int | float = super().estimated_stepping_batches
            return estimate
        rounds: float = inf if self.max_epochs == -1 else max(self.max_epochs, 1)
        if self.max_steps != -1:
            rounds = min(rounds, ceil(self.max_steps / clock.mean_visit.steps))
        return clock.mean_visit.steps * int(rounds)


class _CohortBar:
    """Comes before a progress bar's own class: its steps are clients."""

    @property
    def total_train_batches(self) -> int | float:
        return self.trainer.fit_loop.epoch_loop.clock.places  # type: ignore[attr-defined,no-any-return]


def count_visits(trainer: Trainer) -> None:
    """Lets a trainer with a federated epoch loop show the numbers of visits, and its progress bars those of cohorts."""
    trainer.fit_loop = FederatedFitLoop(trainer.fit_loop)
    _put_before(trainer, _VisitTrainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        own = getattr(type(callback), "total_train_batches", None)
        if own is not None and own is getattr(callbacks.ProgressBar, "total_train_batches", None):
            _put_before(callback, _CohortBar)


def _put_before(thing: Any, first: type) -> None:
    """Gives an object's class other properties, under the same name.

    Nothing less reaches properties of an object that a user has made: attributes cannot replace them, and others hold
    the object, so that another one in its place would not be seen.
    """
    own: Any = type(thing)
    if not issubclass(own, first):
        names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
        thing.__class__ = type(own.__name__, (first, own), names)


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
