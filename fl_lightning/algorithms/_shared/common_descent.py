# SPDX-License-Identifier: Apache-2.0
"""What FedMDFG and FedLF share: the fair-driven weights, and the common descent direction."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.algorithms._shared.rows import ZERO_DIRECTION, row_norms

EQUAL_LOSSES = 1e-6  # radians between losses and (1, ..., 1) below which no client is behind


def loss_angle(losses: Tensor) -> float:
    """Angle in radians between a loss vector and ``(1, ..., 1)``; 0 where all losses are 0."""
    mean = losses.mean()
    # tan(angle) = deviation / mean keeps its digits where arccos of a cosine near 1 loses them.
    return math.atan2(float((losses - mean).norm()), float(mean) * math.sqrt(len(losses)))


def fair_weights(losses: Tensor, cosine: bool = False, equal: float = EQUAL_LOSSES) -> Tensor:
    """Weights of the fair-driven objective: positive for clients whose loss must fall faster.

    Losses stay on their device, which is not waited for.

    Args:
        losses: ``[m]``.
        cosine: the gradient of ``-cos(1, F)`` (FedLF, equation 5), which is ``sin(angle(F, 1)) / ||F||`` long, in place
            of weights ``h`` of unit length along it (FedMDFG, Algorithm 1, line 14).
        equal: angle in radians between losses and ``(1, ..., 1)`` up to which losses count as equal.

    Returns:
        ``[m]``; zeros where the direction is undefined: one client, equal losses, or all losses 0.
    """
    squares, deviation = losses.square().sum(), (losses - losses.mean()).norm()
    h = losses.sum() / squares * losses - 1
    apart = deviation > math.tan(equal) / math.sqrt(len(losses)) * losses.sum().abs()
    return torch.where(apart, h / h.norm() * (deviation / squares if cosine else 1.0), 0.0)


def common_descent(
    gram: Tensor, scale: Tensor, fair: Tensor | None, online: int, rounding: float
) -> tuple[Tensor, Tensor]:
    """Shortest vector in the convex hull of scaled rows and a fair row, for a batch of blocks of layers (MGDA).

    Runs where ``gram`` is, and reads nothing back.

    Args:
        gram: ``[B, k, k]``, ``k = m + h``.
        scale: ``[B, k]`` factor of each row in the hull; 0 leaves the row out.
        fair: ``[B, k]`` coefficients of the fair row; ``None``, or zeros in a block, leave it out.
        online: ``m``.
        rounding: relative error of products and step, see :func:`rounding_error`.

    Returns:
        ``[B, k]`` coefficients, and ``[B]`` whether the direction is one: not shorter than 1e-4 times the root mean
        square of the scaled online rows, and falling for every online row by more than rounding can turn around. A
        block without online rows has nothing to do: coefficients 0, true.
    """
    rows = torch.diag_embed(scale)
    if fair is not None:
        rows = torch.cat([rows, fair[:, None, :]], 1)
    used = rows.ne(0).any(2)
    # A row left out becomes a copy of one that is not: copies never move the point, and the batch keeps one shape.
    first = used.to(torch.uint8).argmax(1)[:, None, None].expand(-1, 1, rows.shape[2])
    rows = torch.where(used[:, :, None], rows, rows.gather(1, first))
    coeff = (rows.mT @ ops.min_norm(rows @ gram @ rows.mT)[0][:, :, None])[:, :, 0]
    live = scale[:, :online] != 0
    coeff = torch.where(live.any(1, keepdim=True), coeff, 0.0)

    slopes = (gram @ coeff[:, :, None])[:, :, 0]
    norms = row_norms(gram)
    squares = (scale * norms)[:, :online].square()
    long_enough = (coeff * slopes).sum(1) > ZERO_DIRECTION**2 * squares.sum(1) / live.sum(1).clamp_min(1)
    noise = rounding * norms * (coeff.abs() * norms).sum(1, keepdim=True)
    falls = ((slopes > noise)[:, :online] | ~live).all(1)
    return coeff, (long_enough & falls) | ~live.any(1)
