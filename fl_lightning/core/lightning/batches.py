# SPDX-License-Identifier: Apache-2.0
"""A batch on its way from a loader to the module."""

from __future__ import annotations

from typing import Any

from fl_lightning.core.lightning.names import Trainer


def device_batch(trainer: Trainer, batch: Any) -> Any:
    """The batch as a step of the module takes it: in the trainer's precision, after the transfer hooks, on the device.

    Args:
        trainer: the trainer.
        batch: what the loader gave.
    """
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch)
    return trainer.strategy.batch_to_device(batch)
