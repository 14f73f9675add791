# SPDX-License-Identifier: Apache-2.0
"""A batch on its way from a loader to the module."""

from __future__ import annotations

from typing import Any

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
