# SPDX-License-Identifier: Apache-2.0
"""The optimizers that a module asks for, also where no trainer trains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from fl_lightning.lightning.inspection import is_overridden
from fl_lightning.lightning.names import LightningModule, Trainer, lightning_module, quiet

_MadeUp: Any = lightning_module("core.optimizer")._MockOptimizer


def given_optimizers(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Without the one that Lightning makes up for a module that gives none."""
    return [optimizer for optimizer in optimizers if not isinstance(optimizer, _MadeUp)]


def configured_optimizers(module: LightningModule) -> list[Optimizer]:
    """What ``configure_optimizers`` gives on a server, which has no trainer, or for an evaluation, which has no steps.

    The module sees a trainer without data, so a schedule may ask how long the fit is; the answer is made up.
    """
    if not is_overridden("configure_optimizers", module):
        return []
    alone = lightning_module("plugins.environments").LightningEnvironment()  # whatever cluster the process is on
    with quiet():
        asked = _Unemployed(
            accelerator="cpu", devices=1, max_epochs=_LENGTH, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, plugins=[alone],
        )  # fmt: skip
    before = module._trainer
    module.trainer = asked
    try:
        found = module.configure_optimizers()
    except Exception as error:
        raise ValueError(
            f"configure_optimizers of {type(module).__name__} says which parameters are trained, and must run where "
            f"there are no data and no trainer at work, found {type(error).__name__}: {error}"
        ) from error
    finally:
        module.trainer = before
    return [] if found is None else list(lightning_module("core.optimizer")._configure_optimizers(found)[0])


_LENGTH = 1000


class _Unemployed(Trainer):
    """Has no data and counts no batches."""

    estimated_stepping_batches = _LENGTH
    num_training_batches = _LENGTH
