# SPDX-License-Identifier: Apache-2.0
"""Which parameters are trained: those that require gradients and that an optimizer holds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from fl_lightning.clients.optimizer_state import with_wrapped
from fl_lightning.core.modules import trained_parameters
from fl_lightning.lightning.optimizers import given_optimizers


def trained_names(module: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[str, ...]:
    """Names of the parameters that require gradients and that one of the optimizers holds.

    A module without optimizers moves its parameters by hand: there, all that require gradients count.

    Raises:
        ValueError: they hold none, or a tensor that is no parameter of the module and would pass from client to client.
    """
    given = given_optimizers(optimizers)
    able = trained_parameters(module, None)
    if not given:
        return tuple(able)
    kind = type(module).__name__
    groups = [group for optimizer, _ in with_wrapped(given) for group in optimizer.param_groups]
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
