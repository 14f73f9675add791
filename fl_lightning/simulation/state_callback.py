# SPDX-License-Identifier: Apache-2.0
"""The callback through which a federated fit enters and leaves checkpoints and hears of rounds and validation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fl_lightning.core.lightning.checkpoint_io import STATE_KEY
from fl_lightning.core.lightning.names import Callback, LightningModule, Trainer
from fl_lightning.core.lightning.round_progress import RoundPhase

if TYPE_CHECKING:
    from fl_lightning.strategy import FederatedStrategy

VERSION = 1


class FederatedState(Callback):
    """Inserted by the strategy as the first callback; users do not add it.

    A strategy has no section of its own in a Lightning checkpoint, callbacks do. The state holds tensors, numbers and
    strings only, so the file loads with ``weights_only=True``, also where this package is not installed.
    """

    def __init__(self, strategy: FederatedStrategy) -> None:
        self.strategy = strategy
        self.loaded: dict[str, Any] | None = None

    @property
    def state_key(self) -> str:
        """Fixed, so that checkpoints do not depend on arguments."""
        return STATE_KEY

    def state_dict(self) -> dict[str, Any]:
        """Rule states and optimizer states; where in the round the fit is, the loop writes down."""
        return {"version": VERSION, **self.strategy._fits.states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until the strategy is set up: parameters are not bound yet.

        Raises:
            ValueError: the state was written by a version of this package that stores other things.
        """
        if state_dict["version"] != VERSION:
            raise ValueError(
                f"the checkpoint's federated state has version {state_dict['version']}, and this fl_lightning reads "
                f"version {VERSION}: use the fl_lightning that wrote it"
            )
        self.loaded = dict(state_dict)

    # ---- where in the round we are; first in the list, so other callbacks' checkpoints see it right

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A round begins."""
        self.strategy._fits.loop.progress.open_round()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Binds the parameters to evaluate."""
        self.strategy.begin_evaluation("val")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the fairness of the per-client values."""
        self.strategy.end_evaluation(self)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the training parameters back before anybody saves a checkpoint."""
        self.strategy.restore_after_evaluation()
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.strategy._fits.loop.progress.enter(RoundPhase.VALIDATED)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Binds the parameters to evaluate."""
        self.strategy.begin_evaluation("test")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the fairness of the per-client values."""
        self.strategy.end_evaluation(self)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the per-client table."""
        self.strategy.restore_after_evaluation()
        self.strategy.print_clients()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The round is over but for what Lightning does at the end of an epoch.

        Raises:
            RuntimeError: the epoch ended without a server step.
        """
        self.strategy._fits.loop.progress.enter(RoundPhase.EPOCH_END)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module leaves the fit with the parameters to evaluate."""
        self.strategy._fits.loop.progress.enter(RoundPhase.BETWEEN)
        self.strategy._fits.finish()
