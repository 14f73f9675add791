# SPDX-License-Identifier: Apache-2.0
"""The optimizers that a module asks for, also where no trainer trains it, and which parameters they train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fl_lightning.core.modules import trained_parameters
from fl_lightning.lightning.inspection import is_overridden
from fl_lightning.lightning.names import LightningModule, Trainer, lightning_module, quiet

_MadeUp: Any = lightning_module("core.optimizer")._MockOptimizer  # where a module gives none


def trained_names(module: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[str, ...]:
    """Names of the parameters that require gradients and that one of the optimizers holds.

    A module without optimizers moves its parameters by hand: there, all that require gradients count.
    """
    given = [optimizer for optimizer in optimizers if not isinstance(optimizer, _MadeUp)]
    able = trained_parameters(module, None)
    if not given:
        return tuple(able)
    kind = type(module).__name__
    groups = [group for optimizer in with_wrapped(given) for group in optimizer.param_groups]
    held = {id(tensor): tensor for group in groups for tensor in group["params"]}
    own = {id(parameter) for parameter in module.parameters()}
    for key, tensor in held.items():
        if tensor.requires_grad and key not in own:
            raise ValueError(
                f"optimizers must hold parameters of {kind} alone, found a tensor of shape {tuple(tensor.shape)} that "
                "is none: no update would hold it; make it an nn.Parameter of the module, or register its submodule"
            )
    names = tuple(name for name, parameter in able.items() if id(parameter) in held)
    if not names:
        raise ValueError(
            f"an optimizer of configure_optimizers must hold a parameter of {kind} that requires gradients, found none"
        )
    return names


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


def with_wrapped(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers and those in their attributes, each once."""
    found = list(optimizers)
    for optimizer in found:  # which grows
        inside = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
        found += [value for value in inside if not any(value is one for one in found)]
    return found


def client_learning_rate(optimizers: Sequence[Optimizer]) -> tuple[float | None, float]:
    """Learning rate and momentum of the clients' optimizer.

    The rate is ``None`` unless there is a single ``torch.optim.SGD`` with one learning rate for all groups that
    descends: only there an update is the learning rate times a sum of gradients.
    """
    if len(optimizers) != 1 or type(optimizers[0]) is not torch.optim.SGD:
        return None, 0.0
    groups = optimizers[0].param_groups
    rates = {float(group["lr"]) for group in groups}
    momenta = {float(group["momentum"]) for group in groups}
    if len(rates) != 1 or len(momenta) != 1 or any(group["maximize"] for group in groups):
        return None, 0.0
    return rates.pop(), momenta.pop()
