# SPDX-License-Identifier: Apache-2.0
"""Projection onto the dual cone of some vectors: the nearest vector that conflicts with none of them."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.arguments import checked

_REACH, _GROWTH, _ATTEMPTS = 4.0, 8.0, 5
_ENTRIES = 1 << 22  # of the QPs solved at a time: 32 MiB


@checked()
def dual_cone(gram: Tensor, vectors: Tensor) -> Tensor:
    r"""Projects ``p = sum_i u_i g_i`` onto ``{d : d . g_i >= 0 for all i}``, in coefficients of the ``g_i``.

    The projection is ``sum_i v_i g_i`` with the ``v`` that minimises ``v' G v`` over ``v >= u`` (Quinton and Rey,
    Jacobian Descent for Multi-Objective Optimization, 2024, Proposition 1). With unit vectors and ``v = u + x`` this is
    the point of least norm in ``p + cone(g)``. That cone, cut off at a distance ``M``, is the convex hull of ``p`` and
    all ``p + M g_i``: a simplex QP for :func:`fl_lightning.ops.min_norm`. The cut changes nothing if ``p`` itself gets
    weight, and ``M`` grows until it does. A combination on the boundary at the last ``M`` (16384 times the length of
    ``p``) is returned as it is: still ``v >= u``, and optimal among those within reach.

    Args:
        gram: ``[..., m, m]`` inner products of the vectors, symmetric positive semi-definite up to rounding.
        vectors: ``[..., r, m]`` coefficients ``u`` of the ``r`` vectors to project, with the same leading dimensions.

    Returns:
        ``[..., r, m]`` float64, the coefficients ``v``.

    Raises:
        ValueError: shapes do not fit, or a value is NaN or infinite.
    """
    m = gram.shape[-1] if gram.dim() else 0
    fits = gram.dim() >= 2 and gram.shape[-2] == m and m > 0 and vectors.dim() == gram.dim()
    if not fits or vectors.shape[-1] != m or vectors.shape[:-2] != gram.shape[:-2]:
        raise ValueError(
            f"gram and vectors must have shapes [..., m, m] and [..., r, m], found {list(gram.shape)} and "
            f"{list(vectors.shape)}"
        )
    for name, value in (("gram", gram), ("vectors", vectors)):
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} must be finite, found NaN or infinity")
    r = vectors.shape[-2]
    g = gram.to(torch.float64).reshape(-1, 1, m, m).expand(-1, r, m, m).reshape(-1, m, m)
    u = vectors.to(torch.float64).reshape(-1, m)
    chunk = max(1, _ENTRIES // (m + 1) ** 2)
    parts = [_project(g[at : at + chunk], u[at : at + chunk]) for at in range(0, len(u), chunk)]
    return torch.cat(parts).reshape(vectors.shape) if parts else u.reshape(vectors.shape)


def _project(gram: Tensor, u: Tensor) -> Tensor:
    """``[B, m, m]`` and ``[B, m]`` to ``[B, m]``."""
    product = torch.einsum("bij,bj->bi", gram, u)
    length = (u * product).sum(1).clamp(min=0).sqrt()
    scale = gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    # A vector of length zero has no direction; its point then coincides with p, and its weight counts for nothing.
    unit = torch.where(scale > 0, 1 / scale, 0.0)
    cosines = unit[:, :, None] * gram * unit[:, None, :]
    slopes = product * unit / torch.where(length > 0, length, 1.0)[:, None]
    x = torch.zeros_like(u)
    open_ = length > 0
    reach = _REACH
    for _ in range(_ATTEMPTS):
        at = open_.nonzero().flatten()
        if len(at) == 0:
            break
        lam, _ = ops.min_norm(_hull(cosines[at], slopes[at], reach))
        x[at] = reach * lam[:, 1:] * length[at, None] * unit[at]
        cut = (lam[:, 1:] * (unit[at] > 0)).sum(1) >= 1 - 1e-12
        open_[at] = cut
        reach *= _GROWTH
    return u + x


def _hull(cosines: Tensor, slopes: Tensor, reach: float) -> Tensor:
    """Gram matrices ``[B, m + 1, m + 1]`` of the unit vector ``p`` and of ``p + reach g_i``."""
    batch, m = slopes.shape
    hull = torch.ones(batch, m + 1, m + 1, dtype=cosines.dtype, device=cosines.device)
    hull[:, 0, 1:] += reach * slopes
    hull[:, 1:, 0] = hull[:, 0, 1:]
    hull[:, 1:, 1:] += reach * (slopes[:, :, None] + slopes[:, None, :]) + reach**2 * cosines
    return hull
