# SPDX-License-Identifier: Apache-2.0
"""What a Trainer calls in a client's visit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from fl_lightning.federation.client_fit import VisitFit
from fl_lightning.fit.checks import check_trainer
from fl_lightning.lightning.names import LightningModule, Trainer
from fl_lightning.lightning.single_device import OneDevice


class VisitStrategy(OneDevice):
    """Turns ``trainer.fit`` into one client's visit.

    Args:
        visit: the visit.
    """

    def __init__(self, visit: VisitFit) -> None:
        super().__init__()
        self._visit = visit

    def connect(self, model: LightningModule) -> None:
        """Installs the epoch loop."""
        super().connect(model)
        check_trainer(model.trainer)
        self._visit.install(model.trainer)
        self.take_limits(model.trainer)

    def setup(self, trainer: Trainer) -> None:
        """Moves the module to its device, makes the optimizers, and binds the parameters."""
        super().setup(trainer)
        self._visit.bind()

    def process_dataloader(self, dataloader: object) -> object:
        """Turns the client's data into a round."""
        return self._visit.training_loader(dataloader, self.limits["limit_train_batches"])

    def teardown(self) -> None:
        """Gives the parameters their own storage."""
        self._visit.close()
        super().teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's training step, with the client rule's term added to its loss."""
        return self._visit.hooks.training_step(super().training_step, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Lets the client rule correct gradients after the backward pass, before clipping and stepping."""
        closure = self._visit.hooks.corrected(closure, self.precision_plugin)
        return super().optimizer_step(optimizer, closure, model, **kwargs)
