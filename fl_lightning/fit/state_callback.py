# SPDX-License-Identifier: Apache-2.0
"""The callback through which a federated fit enters and leaves checkpoints and hears of rounds and evaluations.

Until a round is closed, checkpoints hold what it has found, and a broken fit goes back to it (:class:`RoundStart`).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Protocol

from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.clients.client_optimizers import ClientOptimizers
from fl_lightning.clients.schedules import scheduled_state
from fl_lightning.fit.evaluation.evaluator import EvaluatedModel, EvaluationReport, Evaluator
from fl_lightning.fit.options import FitOptions
from fl_lightning.lightning.checkpoint_io import STATE_KEY
from fl_lightning.lightning.inspection import is_overridden, users_callback
from fl_lightning.lightning.names import LightningModule, Trainer
from fl_lightning.lightning.round_clock import RoundProgress

VERSION = 1
_HOOK = "on_train_epoch_start"


class RoundStart:
    """The state before a round's first hook, because the hooks run again when the round is trained again.

    Only hooks change parameters between clients, so without any they are not copied.
    """

    def __init__(
        self, trainer: Trainer, binding: BoundParameters, buffers: BufferBank, optimizers: ClientOptimizers
    ) -> None:
        self._trainer, self._binding, self._bank = trainer, binding, buffers
        callback = users_callback(trainer.callbacks, _HOOK)  # type: ignore[attr-defined]
        hooked = callback is not None or is_overridden(_HOOK, trainer.lightning_module)
        binding.sync()
        self.theta = binding.theta.clone() if hooked else binding.theta  # [n]
        self.unsaved = buffers.unsaved()  # non-persistent buffers
        buffers.remember()
        self._buffers = buffers.global_values()
        self._optimizers = optimizers.look()

    def with_buffers(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The module's state dictionary with the buffers as they were."""
        return {name: self._buffers.get(name, value) for name, value in state.items()}

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Writes down the optimizers' options and the states of schedulers."""
        with self._optimizers.shown():
            checkpoint["lr_schedulers"] = deepcopy(
                [c.scheduler.state_dict() for c in self._trainer.lr_scheduler_configs]
            )
            checkpoint["optimizer_states"] = [scheduled_state(optimizer) for optimizer in self._trainer.optimizers]

    def restore(self) -> None:
        """Brings parameters, buffers, optimizers and schedulers back."""
        if self.theta is not self._binding.theta:
            self._binding.theta.copy_(self.theta)
        self._bank.load(self._buffers)
        self._optimizers.restore()


class SavedFit(EvaluatedModel, Protocol):
    """What the callback asks of a fit."""

    def states(self) -> Mapping[str, Any]:
        """What a checkpoint holds of it."""

    def begin_round(self) -> None:
        """The first hook of a round is about to run."""

    @property
    def start(self) -> RoundStart | None:
        """What the open round has found; ``None`` if none is open."""

    def finish(self) -> None:
        """All rounds are over."""


class FederatedState(Evaluator):
    """Inserted by the strategy as the first callback; users do not add it.

    A strategy has no section of its own in a Lightning checkpoint, callbacks do. The state holds tensors, numbers and
    strings only, so the file loads with ``weights_only=True``, also where this package is not installed.
    """

    def __init__(self, fit: SavedFit, options: FitOptions, report: EvaluationReport | None) -> None:
        super().__init__(fit, options, report)
        self._fit = fit
        self._progress: RoundProgress | None = None

    def attach(self, progress: RoundProgress) -> None:
        """A trainer function begins."""
        self._progress, self.loaded = progress, None

    @property
    def state_key(self) -> str:
        """Fixed, so that checkpoints do not depend on arguments."""
        return STATE_KEY

    def state_dict(self) -> dict[str, Any]:
        """Rule states and optimizer states; where in the round the fit is, the loop writes down."""
        return {"version": VERSION, **self._fit.states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until the strategy is set up: parameters are not bound yet."""
        if state_dict["version"] != VERSION:
            raise ValueError(
                f"the checkpoint's federated state has version {state_dict['version']}, and this fl_lightning reads "
                f"version {VERSION}: use the fl_lightning that wrote it"
            )
        self.loaded = dict(state_dict)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """In an open round, all is saved as it was when that began."""
        if self.progress.start is not None:
            checkpoint["loops"]["fit_loop"], checkpoint["global_step"] = self.progress.start, self.progress.steps_before
            if self._fit.start is not None:
                self._fit.start.save(checkpoint)

    # ---- where in the round we are; first in the list, so no hook of a round has run yet when it begins

    @property
    def progress(self) -> RoundProgress:
        """Where in a round the fit is."""
        assert self._progress is not None
        return self._progress

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A round begins."""
        self.progress.open_round()
        self._fit.begin_round()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the training parameters back before anybody saves a checkpoint."""
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.progress.validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The round is over but for what Lightning does at the end of an epoch."""
        self.progress.end_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module leaves the fit with the parameters to evaluate."""
        self.progress.end_fit()
        self._fit.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Comes before other callbacks save a checkpoint, for which other processes no longer wait."""
        trainer.strategy.abandon(exception)  # type: ignore[attr-defined]
