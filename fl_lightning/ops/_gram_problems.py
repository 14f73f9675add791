# SPDX-License-Identifier: Apache-2.0
"""Pure-torch ops on Gram matrices, several at once: conflicts projected away, points of least norm, common descent."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.ops._active_set import Floats, search
from fl_lightning.ops.rows import live_rows, row_norms

_CHUNK = 1 << 22  # elements of the tableaus searched at once: 32 MiB
_ENOUGH = 1e-11  # an excess that only matrices with a negative eigenvalue leave
_RIDGES = (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0, 1e2)


def project_conflicts(gram: Tensor, order: Tensor, keep: Tensor) -> Tensor:
    """See :func:`fl_lightning.ops.project_conflicts`."""
    m = gram.shape[-1]
    if order.device.type == "cpu" and order.sort().values.tolist() != list(range(m)):
        raise ValueError(f"order must be a permutation of 0..{m - 1}, found {order.tolist()}")
    order, keep = order.to(gram.device), keep.to(gram.device)
    coeff = torch.eye(m, dtype=gram.dtype, device=gram.device).repeat(gram.shape[0], 1, 1)
    products = gram.clone()  # products[b, i, j]: projected update i with original update j
    squares = gram.diagonal(dim1=1, dim2=2)
    clients = torch.arange(m, device=gram.device)
    for position in range(m):
        target = order[position : position + 1]
        square = squares.index_select(1, target)
        dots = products.index_select(2, target)[:, :, 0]
        # ~(dots >= 0) instead of dots < 0: a NaN product must show in the result, not count as "no conflict".
        conflict = ~(dots >= 0) & ~(square <= 0) & ~keep & (clients != target)
        share = torch.where(conflict, dots / square, 0.0)[:, :, None]
        coeff.index_add_(2, target, share, alpha=-1)
        products.addcmul_(share, gram.index_select(1, target), value=-1)
    return coeff


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


def common_descent(
    gram: Tensor,
    online: int,
    scale: Tensor | None,
    weights: Tensor | None,
    zero_row: float,
    zero_direction: float,
    rounding: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`fl_lightning.ops.common_descent`."""
    norms, mean = row_norms(gram), None
    if scale is None:
        live = live_rows(norms, online, zero_row)
        mean = (norms * live)[:, :online].sum(1, keepdim=True) / live[:, :online].sum(1, keepdim=True).clamp_min(1)
        scale = torch.where(live, mean / norms, 0.0)
    scale = scale.to(gram.device)
    rows, fine = torch.diag_embed(scale), gram.isfinite().all(2).all(1) & scale.isfinite().all(1)
    if weights is not None:
        weights = weights.to(gram.device)
        rows = torch.cat([rows, _fair_row(gram, scale, weights, mean, zero_direction)[:, None, :]], 1)
        fine &= weights.isfinite().all()
    used = rows.ne(0).any(2)
    fair = fine & used[:, gram.shape[1] :].any(1)
    # A row left out becomes a copy of one that is not: copies never move the point, and the batch keeps one shape.
    first = used.to(torch.uint8).argmax(1)[:, None, None].expand(-1, 1, rows.shape[2])
    rows = torch.where(used[:, :, None], rows, rows.gather(1, first))
    coeff = (rows.mT @ min_norm(rows @ gram @ rows.mT)[0][:, :, None])[:, :, 0]
    live = scale[:, :online] != 0
    coeff = torch.where(live.any(1, keepdim=True), coeff, 0.0)

    slopes = (gram @ coeff[:, :, None])[:, :, 0]
    squares = (scale * norms)[:, :online].square()
    long_enough = (coeff * slopes).sum(1) > zero_direction**2 * squares.sum(1) / live.sum(1).clamp_min(1)
    noise = rounding * norms * (coeff.abs() * norms).sum(1, keepdim=True)
    falls = ((slopes > noise)[:, :online] | ~live).all(1)
    solved = fine & ((long_enough & falls) | ~live.any(1))
    return torch.where(fine[:, None], coeff, torch.nan), solved, fair


def _fair_row(gram: Tensor, scale: Tensor, weights: Tensor, mean: Tensor | None, zero_direction: float) -> Tensor:
    """Coefficients ``[B, k]``; zeros where there is none."""
    fair = torch.zeros_like(scale)
    fair[:, : len(weights)] = weights * scale[:, : len(weights)]
    if mean is None:
        return fair
    size = (fair * (gram @ fair[:, :, None])[:, :, 0]).sum(1, keepdim=True).clamp_min(0).sqrt()
    return torch.where(size > zero_direction * weights.norm() * mean, fair * mean / size, 0.0)
