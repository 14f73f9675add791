# SPDX-License-Identifier: Apache-2.0
"""The module's own loss of a client's data at some model, for client rules that train or measure by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.records import LocalWork
from fl_lightning.core.model_snapshot import Snapshot, standing_in
from fl_lightning.core.seeding import derive_seed, isolated


def refuse_manual_optimization(module: nn.Module, use: str, otherwise: str = "") -> None:
    """Refuses modules whose ``training_step`` does not leave its loss to others to descend.

    ``use`` says what a rule does with the loss, with braces for the step's name; ``otherwise`` what else helps.
    """
    if not getattr(module, "automatic_optimization", True):
        whose = use.format(f"{type(module).__name__}.training_step")
        raise ValueError(f"{whose}, which optimizes manually: use automatic optimization{otherwise}")


def measured_loss(work: LocalWork, model: Snapshot, purpose: str, slope: bool) -> tuple[float, Tensor]:
    """Mean loss over the client's samples in evaluation mode, and its gradient ``[n]`` up to a factor.

    Calls with one ``purpose`` draw equal random numbers. Without a ``slope`` the gradient is zero.
    """
    if work.batches is None or work.own_loss is None:
        raise ValueError(f"batches and own_loss of the client's work must be given to measure its {purpose}")
    total, count, gradient = 0.0, 0, torch.zeros_like(work.params)
    seed = derive_seed(torch.initial_seed(), purpose)
    stand_in = standing_in(work.module, work.parameters, work.layout, model, evaluate=True)
    with isolated(seed, work.params.device), torch.set_grad_enabled(slope), stand_in:
        for index, (batch, size) in enumerate(work.batches()):
            loss = work.own_loss(batch, index)
            if slope:
                add_gradient(gradient, loss, work, float(size))
            total, count = total + size * float(loss.detach()), count + size
    return total / max(count, 1), gradient


def add_gradient(total: Tensor, loss: Tensor, work: LocalWork, factor: float) -> None:
    """Adds ``factor`` times the gradient of a loss to ``total [n]``."""
    parameters: Sequence[Tensor] = work.parameters
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for view, gradient in zip(work.layout.views(total), gradients, strict=True):
        if gradient is not None:
            view.add_(gradient, alpha=factor)
