# SPDX-License-Identifier: Apache-2.0
"""Pure-torch ``common_descent``: the hull's Gram matrices, their points of least norm, and whether these descend."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.ops._min_norm import min_norm
from fl_lightning.ops.live_rows import live_rows, row_norms


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
