# SPDX-License-Identifier: Apache-2.0
"""A batch on its way from the loader to the module."""

from __future__ import annotations

from typing import Any

from fl_lightning.core.lightning.names import Trainer


def move_to_device(trainer: Trainer, batch: Any) -> Any:
    """The batch after the transfer hooks of the module or the data module, on the device."""
    return trainer.strategy.batch_to_device(trainer.lightning_module._on_before_batch_transfer(batch))
