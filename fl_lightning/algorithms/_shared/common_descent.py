# SPDX-License-Identifier: Apache-2.0
"""What FedMDFG and FedLF share: the fair-driven weights, and the common descent direction."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from fl_lightning import ops
from fl_lightning.algorithms._shared.rows import ZERO_DIRECTION, ZERO_ROW, rounding_error
from fl_lightning.core.cohort import Cohort

EQUAL_LOSSES = 1e-6  # radians between losses and (1, ..., 1) below which no client is behind


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
