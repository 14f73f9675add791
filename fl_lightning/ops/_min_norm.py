# SPDX-License-Identifier: Apache-2.0
"""Pure-torch ``min_norm``: scaling, closed forms, the active-set search on the host, and the gap."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.ops._active_set import Floats, search

_CHUNK = 1 << 22  # elements of the tableaus searched at once: 32 MiB
_ENOUGH = 1e-11  # an excess that only matrices with a negative eigenvalue leave
_RIDGES = (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0, 1e2)


def min_norm(gram: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`fl_lightning.ops.min_norm`."""
    matrices: Floats = gram.detach().cpu().numpy()
    lam, gap = _solve(matrices)
    return torch.from_numpy(lam).to(gram.device), torch.from_numpy(gap).to(gram.device)


def _solve(gram: Floats) -> tuple[Floats, Floats]:
    batch, k, _ = gram.shape
    lam, gap = np.full((batch, k), np.nan), np.full(batch, np.nan)
    finite = np.isfinite(gram).all(axis=(1, 2))
    scaled, mean = _scaled(gram[finite])
    if k <= 2:
        point = _segment(scaled) if k == 2 else np.ones((len(scaled), 1))
        excess = _excess(scaled, point)
    else:
        size = max(1, _CHUNK // (k + 1) ** 2)
        point, excess = np.empty((len(scaled), k)), np.empty(len(scaled))
        for begin in range(0, len(scaled), size):
            part = slice(begin, begin + size)
            point[part], excess[part] = _searched(scaled[part])
    lam[finite], gap[finite] = point, excess / mean
    return lam, gap


def _searched(gram: Floats) -> tuple[Floats, Floats]:
    """Searches, and searches again with a ridge where the matrix turned out not to be positive semi-definite."""
    point = search(gram)
    excess = _excess(gram, point)
    for ridge in _RIDGES:
        poor = np.flatnonzero(excess > _ENOUGH)
        if poor.size == 0:
            break
        retried = search(gram[poor] + ridge * np.eye(gram.shape[-1]))
        better = _excess(gram[poor], retried)
        wins = better < excess[poor]
        point[poor[wins]], excess[poor[wins]] = retried[wins], better[wins]
    return point, excess


def _excess(gram: Floats, point: Floats) -> Floats:
    """``max_j (lam' G lam - (G lam)_j)``, clipped at 0."""
    slope = (gram * point[:, None, :]).sum(2)
    excess: Floats = np.maximum((slope * point).sum(1) - slope.min(1), 0.0)
    return excess


def _scaled(gram: Floats) -> tuple[Floats, Floats]:
    """Scales by a power of two, which is exact, to mean diagonals in [1/2, 1), and makes symmetry exact."""
    k = gram.shape[-1]
    mean = (np.diagonal(gram, axis1=1, axis2=2) / k).sum(1)
    exponent = np.where(mean > 0.0, np.frexp(mean)[1], 0)
    scaled = np.ldexp(gram, -exponent[:, None, None])
    scaled = 0.5 * scaled + 0.5 * scaled.transpose(0, 2, 1)
    return scaled, np.where(mean > 0.0, np.ldexp(mean, -exponent), 1.0)


def _segment(gram: Floats) -> Floats:
    """The nearest point of a segment; of two equal rows each gets one half."""
    first, second = gram[:, 1, 1] - gram[:, 0, 1], gram[:, 0, 0] - gram[:, 0, 1]
    length = first + second
    distinct = length > 0.0
    # Rows that differ by less than the Gram matrix resolves: the shorter one, if there is one.
    shorter = 0.5 + 0.5 * np.sign(first - second)
    weight = np.where(distinct, np.clip(first / np.where(distinct, length, 1.0), 0.0, 1.0), shorter)
    return np.stack([weight, 1.0 - weight], axis=1)
