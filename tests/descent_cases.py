# SPDX-License-Identifier: Apache-2.0
"""Common descent directions on the vectors themselves, for judging what ops compute from Gram matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from qp_cases import shortest_point
from torch import Tensor

BOUNDS = (1e-8, 1e-4, 1e-15)  # zero_row, zero_direction, rounding


@dataclass(frozen=True)
class Descent:
    """A direction ``[n]``, and what is said of it.

    Attributes:
        size: length of the longest vector of the hull.
        clear: its length and its slopes are far from their bounds.
    """

    direction: Tensor
    solved: bool
    fair: bool
    size: float
    clear: bool


def descent_on_vectors(vectors: Tensor, online: int, scale: Tensor | None, weights: Tensor | None) -> Descent:
    """As :func:`fl_lightning.ops.common_descent` says, step by step, for the rows ``[k, n]`` of one layer."""
    rows, none = vectors.numpy(), torch.zeros(vectors.shape[1], dtype=torch.float64)
    lengths, mean = np.linalg.norm(rows, axis=1), None
    if scale is None:
        ordered = sorted(length for length in lengths[:online] if length)
        usual = ordered[(len(ordered) - 1) // 2] if ordered else np.inf
        counts = lengths > BOUNDS[0] * usual
        mean = lengths[:online][counts[:online]].mean() if counts[:online].any() else 0.0
        factors = np.array([mean / length if live else 0.0 for length, live in zip(lengths, counts, strict=True)])
    else:
        factors = scale.numpy()
    hull = [factor * row for factor, row in zip(factors, rows, strict=True) if factor]
    has_fair_row = False
    if weights is not None and any(factors[:online]):
        fair = (weights.numpy() * factors[:online]) @ rows[:online]
        has_fair_row = bool((weights.numpy() * factors[:online]).any())
        if mean is not None:
            has_fair_row = np.linalg.norm(fair) > BOUNDS[1] * float(weights.norm()) * mean
            fair = fair / np.linalg.norm(fair) * mean if has_fair_row else fair
        hull += [fair] if has_fair_row else []
    live = [factor * row for factor, row in zip(factors[:online], rows, strict=False) if factor]
    if not live:
        return Descent(none, True, has_fair_row, 0.0, True)
    direction = shortest_point(np.array(hull))
    usual = np.sqrt(np.mean([row @ row for row in live])) or 1.0
    slopes = [row @ direction / (np.linalg.norm(row) * usual) if row.any() else 0.0 for row in live]
    length = np.linalg.norm(direction) / usual
    solved = bool(length > BOUNDS[1] and min(slopes) > 0)
    clear = bool(not 1e-5 < length < 1e-3 and abs(min(slopes)) > 1e-9)
    return Descent(torch.from_numpy(direction), solved, has_fair_row, float(np.linalg.norm(hull, axis=1).max()), clear)


def opposed(size: float) -> Tensor:
    """Two unit rows whose hull comes as close to zero as ``size``."""
    return torch.tensor([[math.sqrt(1 - size**2), size], [-math.sqrt(1 - size**2), size]], dtype=torch.float64)


def opposed_among_ten(size: float) -> Tensor:
    """Ten rows; two of them are opposed and leave a direction of ``size``."""
    rows = torch.eye(10, 12, dtype=torch.float64)
    rows[:, 10] = size
    rows[0, :10], rows[1, :10] = 0.0, 0.0
    rows[0, 11], rows[1, 11] = 1.0, -1.0
    return rows


def not_quite_symmetric() -> tuple[Tensor, Tensor]:
    """Matrices ``[3, 5, 5]`` of whole numbers, and their symmetric parts, which are exact."""
    factors = torch.randint(-8, 9, (3, 5, 7), generator=torch.Generator().manual_seed(3)).double()
    apart = torch.randint(-1, 2, (3, 5, 5), generator=torch.Generator().manual_seed(4)).double()
    gram = factors @ factors.mT
    return gram + apart - apart.mT, gram


def vectors_of(online: int, remembered: int, n: int = 9) -> Tensor:
    """``[B, online + remembered, n]``: rows that are random, zero, equal, opposed, dependent, long, short."""
    generator, k = torch.Generator().manual_seed(online), online + remembered
    rows = torch.randn(8, k, n, generator=generator, dtype=torch.float64)
    rows[1:] += 0.5
    rows[2, 0] = 0
    rows[3, -1] = rows[3, 0]
    rows[4, -1] = -rows[4, 0]
    rows[5] = rows[5, :, :2] @ rows[5, :2]  # in a plane
    rows[6, 0] *= 1e6
    rows[7, -1] *= 1e-11
    return rows
