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
    """Weights of the fair-driven objective: positive for clients whose loss must fall faster.

    Args:
        losses: ``[m]`` on the CPU.
        cosine: the gradient of ``-cos(1, F)`` (FedLF, equation 5), which is ``sin(angle(F, 1)) / ||F||`` long, in place
            of weights ``h`` of unit length along it (FedMDFG, Algorithm 1, line 14).
        equal: angle in radians between losses and ``(1, ..., 1)`` up to which losses count as equal.

    Returns:
        ``[m]``; ``None`` where the direction is undefined: one client, equal losses, or all losses 0.
    """
    m, total, squares = len(losses), float(losses.sum()), float(losses.square().sum())
    deviation = float((losses - total / m).norm())
    if not deviation > math.tan(equal) / math.sqrt(m) * abs(total):
        return None
    h = total / squares * losses - 1
    weights: Tensor = h / h.norm() * (deviation / squares if cosine else 1.0)
    return weights


class Directions(NamedTuple):
    """Directions of ``B`` layers or blocks of layers.

    Attributes:
        coeff: ``[B, m + h]`` their coefficients.
        solved: ``[B]`` whether they are not zero, and fall for every online row.
        fair: ``[B]`` whether the hull had the fair row.
    """

    coeff: Tensor
    solved: Tensor
    fair: Tensor


def common_descent(
    gram: Tensor, cohort: Cohort, weights: Tensor | None = None, scale: Tensor | None = None
) -> Directions:
    """Shortest vectors in the convex hulls of rows and a fair row (MGDA), see :func:`fl_lightning.ops.common_descent`.

    Args:
        gram: ``[B, m + h, m + h]``.
        cohort: the round's clients, whose rows come first.
        weights: ``[m]`` of the fair row; ``None``, or zeros, leave it out.
        scale: ``[B, m + h]`` factor of each row, 0 leaves it out; ``None``: rows of equal length.
    """
    return Directions(
        *ops.common_descent(
            gram,
            len(cohort),
            scale,
            weights,
            zero_row=ZERO_ROW,
            zero_direction=ZERO_DIRECTION,
            rounding=rounding_error(cohort),
        )
    )
