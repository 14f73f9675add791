# SPDX-License-Identifier: Apache-2.0
"""Weights of the clients, and the mean of their rows with these weights."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.rows import require_finite
from fl_lightning.arguments import checked
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


def known_accuracies(cohort: Cohort, method: str) -> Tensor:
    """The cohort's accuracies ``[m]``, float64 on the CPU.

    Raises:
        ValueError: the cohort has none, or one is negative or not finite.
    """
    accuracies = cohort.extras.get("accuracy")
    if accuracies is None:
        raise ValueError(f"extras must hold 'accuracy' [m] for {method}, found {sorted(cohort.extras)}")
    if accuracies.shape != (len(cohort),) or not bool((accuracies >= 0).all() & accuracies.isfinite().all()):
        found = f"{len(cohort)} finite numbers from 0 on, found {accuracies.tolist()}"
        raise ValueError(f"extras['accuracy'] must be {found}")
    return accuracies.cpu()


def shares(values: Tensor) -> Tensor:
    """Nonnegative numbers ``[m]`` divided by their sum; equal shares where all are 0."""
    largest = values.max()
    if not largest > 0:
        return torch.full_like(values, 1.0 / len(values))
    scaled = values / largest  # the sum cannot overflow
    return scaled / scaled.sum()


def information(probabilities: Tensor) -> Tensor:
    """Shares of ``-log2(p + 1e-6)``; the offset of FedFa's published code keeps it finite. A certain event has none."""
    return shares(-torch.log2((probabilities + 1e-6).clamp(max=1)))


def stands_still(cohort: Cohort) -> bool:
    """Whether all rows are zero; a rule's state stays as it is in such a round."""
    return not bool(cohort.updates.norms().any())


@checked()
def data_weights(cohort: Cohort) -> Tensor:
    """``[m]`` weights proportional to the clients' sample counts, summing to 1 (float64)."""
    return cohort.sizes / cohort.sizes.sum()


@checked()
def uniform_weights(cohort: Cohort) -> Tensor:
    """``[m]`` equal weights summing to 1 (float64)."""
    return torch.full_like(cohort.sizes, 1.0 / len(cohort))


def weighted_mean(cohort: Cohort, weights: Tensor) -> Tensor:
    """Linear combination of the rows with weights ``[m]``, the same in all layers.

    Raises:
        ValueError: a row, which it names by its client, or the mean is not finite.
    """
    step = cohort.updates.combine(weights)
    if not bool(cohort.updates.norm_of(step).isfinite()):
        require_finite(cohort.updates.norms().isfinite(), cohort)
        raise ValueError(f"updates must have a mean that is finite in {step.dtype}, found NaN or infinity")
    return step
