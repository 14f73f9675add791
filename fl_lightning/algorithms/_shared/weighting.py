# SPDX-License-Identifier: Apache-2.0
"""What methods share that turn losses into weights."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.core.cohort import Cohort


def nonnegative_losses(cohort: Cohort, method: str) -> Tensor:
    """The cohort's losses ``[m]``, float64 on the CPU, for methods that take them for proportions.

    Raises:
        ValueError: the cohort has no losses, or a loss is negative.
    """
    losses = cohort.known_losses.cpu()
    if bool((losses < 0).any()):
        raise ValueError(
            f"losses must not be negative for {method}, found {losses.tolist()} from clients {cohort.client_ids}: "
            "use a loss that is bounded below by 0, such as cross entropy"
        )
    return losses


def shares(values: Tensor) -> Tensor:
    """Nonnegative numbers ``[m]`` divided by their sum; equal shares where all are 0."""
    largest = values.max()
    if not largest > 0:
        return torch.full_like(values, 1.0 / len(values))
    scaled = values / largest  # the sum cannot overflow
    return scaled / scaled.sum()


def stands_still(cohort: Cohort, step: Tensor) -> bool:
    """Whether nobody moved: such a round says nothing, and a rule's state stays as it is."""
    return not bool(step.any()) and not bool(cohort.updates.rows.any())


def data_weights(cohort: Cohort) -> Tensor:
    """``[m]`` weights proportional to the clients' sample counts, summing to 1 (float64)."""
    return cohort.sizes / cohort.sizes.sum()


def uniform_weights(cohort: Cohort) -> Tensor:
    """``[m]`` equal weights summing to 1 (float64)."""
    return torch.full_like(cohort.sizes, 1.0 / len(cohort))


def weighted_mean(cohort: Cohort, weights: Tensor) -> Tensor:
    """Linear combination of the rows with weights ``[m]``, the same in all layers.

    Raises:
        ValueError: names the clients whose row is not finite.
    """
    step = cohort.updates.combine(weights)
    if not bool(torch.isfinite(step).all()):
        finite = torch.isfinite(cohort.updates.rows).all(1).tolist()
        clients = [i for i, fine in zip(cohort.client_ids, finite, strict=True) if not fine]
        raise ValueError(f"updates must be finite, found NaN or infinity in the rows of clients {clients}")
    return step
