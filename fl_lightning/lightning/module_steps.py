# SPDX-License-Identifier: Apache-2.0
"""What goes into a step of the module, and the loss that comes out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fl_lightning.lightning.names import Trainer, lightning_module


def move_to_device(trainer: Trainer, batch: Any, loader: int = 0) -> Any:
    """The batch of a loader after the transfer hooks of the module or the data module, on the device."""
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=loader)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=loader)


def device_batch(trainer: Trainer, batch: Any, loader: int = 0) -> Any:
    """The batch as a step of the module takes it: in the trainer's precision, after the hooks, on the device."""
    return move_to_device(trainer, trainer.precision_plugin.convert_input(batch), loader)


def batch_size(batch: Any) -> int:
    """How much a batch weighs in ``self.log``, where nobody says it: Lightning's own guess."""
    return int(lightning_module("utilities.data").extract_batch_size(batch))


def loss_of(output: Any) -> Tensor | None:
    """The loss in what ``training_step`` returned; ``None`` if the step wants this batch skipped.

    What else it returns is Lightning's own MisconfigurationException, which modules with hooks get from Lightning
    itself.
    """
    # Tensors first: this runs for every local batch.
    if isinstance(output, Tensor) or output is None:
        return output
    found = type(output).__name__
    if isinstance(output, Mapping):
        loss = output.get("loss")
        if isinstance(loss, Tensor):
            return loss
        found = f"a dict with {sorted(map(str, output))}" if loss is None else f"{type(loss).__name__} as 'loss'"
    error: type[Exception] = lightning_module("utilities.exceptions").MisconfigurationException
    raise error(
        "training_step must return a tensor, a dict with the loss as 'loss', or None to skip the batch, where "
        f"optimization is automatic, found {found}"
    )
