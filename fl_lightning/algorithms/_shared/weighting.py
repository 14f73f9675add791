# SPDX-License-Identifier: Apache-2.0
"""Weights of the clients, and the mean of their rows with these weights."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.rows import require_finite
from fl_lightning.arguments import checked
from fl_lightning.core.cohort import Cohort


def nonnegative_losses(cohort: Cohort, method: str) -> Tensor:
    """The cohort's losses ``[m]``, float64 on the CPU, for methods that take them for proportions."""
    losses = cohort.known_losses
    if bool((losses < 0).any()):
        raise ValueError(
            f"losses must not be negative for {method}, found {losses.tolist()} from clients {cohort.client_ids}: "
            "use a loss that is bounded below by 0, such as cross entropy"
        )
    return losses


def reported(cohort: Cohort, name: str, shape: tuple[int | None, ...], method: str) -> Tensor:
    """What all clients reported under a name, ``[m, ...]`` float64 on the CPU; in a shape, ``None`` is any length."""
    found, m = cohort.extras.get(name), len(cohort)
    sizes = ", ".join("m" if place == 0 else str(size or "any") for place, size in enumerate((m, *shape)))
    if found is None:
        raise ValueError(f"extras must hold {name!r} [{sizes}] for {method}, found {sorted(cohort.extras)}")
    if found.dim() != 1 + len(shape) or any(b not in (None, a) for a, b in zip(found.shape[1:], shape, strict=True)):
        raise ValueError(f"extras[{name!r}] must have shape [{sizes}] for {method}, found {list(found.shape)}")
    values = found.cpu()
    _require(values.isfinite(), values, None, cohort, name, method)
    return values


def require_parts(values: Tensor, wholes: Tensor | float, cohort: Cohort, name: str, method: str) -> None:
    """Checks that what clients reported under a name ``[m, ...]`` lies between 0 and what it is a part of."""
    limits = torch.as_tensor(wholes, dtype=values.dtype).expand_as(values)
    _require((values >= 0) & (values <= limits), values, limits, cohort, name, method)


def _require(sound: Tensor, values: Tensor, limits: Tensor | None, cohort: Cohort, name: str, method: str) -> None:
    by_client = sound.reshape(len(cohort), -1).all(1).tolist()
    if not all(by_client):
        place = by_client.index(False)
        words = "be finite" if limits is None else f"lie between 0 and {limits[place].tolist()}"
        told = f"{values[place].tolist()} from client {cohort.client_ids[place]}"
        raise ValueError(f"extras[{name!r}] must {words} for {method}, found {told}")


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


@checked()
def weighted_mean(cohort: Cohort, weights: Tensor) -> Tensor:
    """Linear combination ``[n]`` of the rows with weights ``[m]``, the same in all layers.

    Raises:
        ValueError: weights have another shape; or the mean is not finite, and the message names the clients whose rows
            are not.
    """
    if weights.shape != (len(cohort),):
        raise ValueError(f"weights must have shape [{len(cohort)}], found {list(weights.shape)}")
    step = cohort.updates.combine(weights)
    if not isfinite(float(cohort.updates.norm_of(step))):
        require_finite(cohort.updates.norms().isfinite(), cohort)
        raise ValueError(f"updates must have a mean that is finite in {step.dtype}, found NaN or infinity")
    return step
