# SPDX-License-Identifier: Apache-2.0
"""Steps that are combinations of rows, decided on the rows' inner products.

A combination ``d = V^T c`` of the rows of ``V`` is known by its coefficients ``c``. Everything about it follows from
the Gram matrix ``K = V V^T``: ``V d = K c`` and ``||d||^2 = c^T K c``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import StepReport
from fl_lightning.core.cohort import Cohort
from fl_lightning.ops.live_rows import live_rows as live_rows_beside

ZERO_ROW = 1e-8  # a row this much shorter than the median online one counts as zero
ZERO_DIRECTION = 1e-4  # a direction this much shorter than the rows counts as zero
SHORT_DIRECTION = 1e-2  # one this much shorter than the mean row is flagged: it leaves out nearly all that rows share
EQUAL_LOSSES = 1e-6  # radians between losses and (1, ..., 1) below which no client is behind


def live_rows(norms: Tensor, online: int) -> Tensor:
    """Which rows count, by their lengths ``[..., k]``: those that are not zero beside the median online one."""
    return live_rows_beside(norms, online, ZERO_ROW)


def length(coeff: Tensor, gram: Tensor) -> Tensor:
    """Length of the combination with coefficients ``[k]``, from ``[k, k]``."""
    return (coeff @ gram @ coeff).clamp_min(0).sqrt()


def products(gram: Tensor, coeff: Tensor) -> Tensor:
    """Products ``[L, k]`` of all rows with the combinations with coefficients ``[L, k]``, from ``[L, k, k]``."""
    return torch.bmm(gram, coeff[:, :, None])[:, :, 0]


def mean_squares(gram: Tensor, online: int) -> Tensor:
    """Squared lengths ``[L]`` of the mean of the online rows, from ``[L, k, k]``."""
    return gram[:, :online, :online].mean((1, 2))


class Rescaled(NamedTuple):
    """A direction at its final length."""

    coeff: Tensor  # [L, k]
    factor: float  # what it was multiplied by
    ratio: float  # how long it was before, beside the mean row


def lengths(coeff: Tensor, slopes: Tensor, squares: Tensor) -> Tensor:
    """Lengths ``[2]`` of a direction over all layers, and of the mean of the online rows.

    It is known by its coefficients ``[L, k]``, its :func:`products` ``[L, k]``, and :func:`mean_squares` ``[L]``.
    """
    return torch.stack(((coeff * slopes).sum(), squares.sum())).clamp_min(0).sqrt()


def as_long_as_mean(coeff: Tensor, slopes: Tensor, squares: Tensor) -> Rescaled:
    """Rescales a direction so that the whole step is as long as the mean of the online rows; see :func:`lengths`."""
    size, target = lengths(coeff, slopes, squares).tolist()
    factor = target / size if size > 0 else 0.0
    return Rescaled(coeff * factor, factor, size / target if target > 0 else 0.0)


def rounding_error(cohort: Cohort) -> float:
    """Relative error to expect in products of rows and in the step; half precision is not held to its own."""
    return min(torch.finfo(cohort.updates.dtype).eps, torch.finfo(torch.float32).eps)


def require_finite(finite: Tensor, cohort: Cohort, method: str = "") -> None:
    """Refuses rows with NaN or infinity, and names their clients; ``finite`` ``[m]`` says whose rows are fine."""
    clients = [client for client, fine in zip(cohort.client_ids, finite.tolist(), strict=True) if not fine]
    if clients:
        rule = f" for {method}" if method else ""
        raise ValueError(f"updates must be finite{rule}, found NaN or infinity in the rows of clients {clients}")


def no_step(rule: ServerRule, cohort: Cohort, **scalars: float) -> Tensor:
    """The step 0 ``[n]``, which the rule's report flags."""
    rule.report = StepReport(weights=torch.zeros(len(cohort), dtype=torch.float64), flagged=True, scalars=scalars)
    return torch.zeros_like(cohort.params)


# ---- the fair-driven weights and the common descent direction of FedMDFG and FedLF


def loss_angle(losses: Tensor) -> float:
    """Angle in radians between a loss vector and ``(1, ..., 1)``; 0 where all losses are 0."""
    mean = losses.mean()
    # tan(angle) = deviation / mean keeps its digits where arccos of a cosine near 1 loses them.
    return math.atan2(float((losses - mean).norm()), float(mean) * math.sqrt(len(losses)))


def fair_weights(losses: Tensor, cosine: bool = False, equal: float = EQUAL_LOSSES) -> Tensor | None:
    """Weights ``[m]`` of the fair-driven objective: positive for clients whose loss must fall faster.

    They are of unit length (``h``: FedMDFG, Algorithm 1, line 14). With ``cosine`` they are the gradient of
    ``-cos(1, F)`` (FedLF, equation 5), which is ``sin(angle(F, 1)) / ||F||`` long. ``None`` where the direction is
    undefined: one client, losses all 0, or equal up to an angle ``equal`` in radians between them and ``(1, ..., 1)``.
    """
    m, total, squares = len(losses), float(losses.sum()), float(losses.square().sum())
    deviation = float((losses - total / m).norm())
    if not deviation > math.tan(equal) / math.sqrt(m) * abs(total):
        return None
    h = total / squares * losses - 1
    weights: Tensor = h / h.norm() * (deviation / squares if cosine else 1.0)
    return weights


class Directions(NamedTuple):
    """Directions of ``B`` layers or blocks of layers."""

    coeff: Tensor  # [B, m + h]
    solved: Tensor  # [B] whether they are not zero, and fall for every online row
    fair: Tensor  # [B] whether the hull had the fair row


def common_descent(
    gram: Tensor, cohort: Cohort, weights: Tensor | None = None, scale: Tensor | None = None
) -> Directions:
    """Shortest vectors in the convex hulls of rows and a fair row (MGDA), see :func:`fl_lightning.ops.common_descent`.

    From ``gram [B, m + h, m + h]``, weights ``[m]`` of the fair row (``None``, or zeros, leave it out) and factors
    ``scale [B, m + h]`` of the rows, of which 0 leaves one out; ``None``: rows of equal length.
    """
    rounding = rounding_error(cohort)
    return Directions(
        *ops.common_descent(
            gram, len(cohort), scale, weights, zero_row=ZERO_ROW, zero_direction=ZERO_DIRECTION, rounding=rounding
        )
    )
