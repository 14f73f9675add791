# SPDX-License-Identifier: Apache-2.0
"""How a client's batch reaches the module, and the loss that comes back."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.lightning.batches import move_to_device
from fl_lightning.lightning.inspection import takes_batch_index, transfer_is_hooked
from fl_lightning.lightning.module.object_state import Undone
from fl_lightning.lightning.names import LightningModule, Trainer
from fl_lightning.lightning.training_output import loss_of


class ModuleCalls:
    """Calls ``training_step`` as Lightning does.

    Attributes:
        module: the trainer's module.
        hooked: hooks of the module or the data module see batches on their way to the device.
        undone: runs the module without a trace.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.module: LightningModule = trainer.lightning_module
        self.undone = Undone(self.module)
        self.hooked = transfer_is_hooked(trainer)
        self._takes_index = takes_batch_index(self.module.training_step)
        self._stays = not self.hooked and trainer.strategy.root_device.type == "cpu"

    def to_device(self, batch: Any) -> Any:
        """The batch as the module takes it: after the transfer hooks, on the device."""
        return batch if self._stays else move_to_device(self._trainer, batch)

    def converted(self, batch: Any) -> Any:
        """The batch in the trainer's precision, on the device."""
        return self.to_device(self._trainer.precision_plugin.convert_input(batch))

    def training_output(self, batch: Any, index: int) -> Any:
        """What ``training_step`` returns."""
        return self.module.training_step(batch, index) if self._takes_index else self.module.training_step(batch)

    def training_loss(self, batch: Any, index: int) -> Tensor | None:
        """The loss of ``training_step``; ``None`` if it skips the batch."""
        return loss_of(self.training_output(batch, index))

    def unlogged_loss(self, batch: Any, index: int) -> Tensor:
        """The module's loss of a batch as it is at the moment; nothing is logged and metrics stay as they are.

        Raises:
            ValueError: the module skips the batch.
        """
        with self.undone(evaluate=False), self._trainer.precision_plugin.train_step_context():
            loss = loss_of(self.training_output(batch, index))
        if loss is None:
            raise ValueError("training_step must return a loss for every batch for this method, found None")
        return loss

    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Clips the gradients of an optimizer's parameters where ``Trainer(gradient_clip_val=...)`` asks for it."""
        if self._trainer.gradient_clip_val is not None:
            self.module.clip_gradients(optimizer)
