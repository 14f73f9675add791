# SPDX-License-Identifier: Apache-2.0
"""The point of least norm in a convex hull (the QP of MGDA and its relatives)."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.arguments import checked


@checked()
def min_norm(gram: Tensor) -> Tensor:
    """Weights of the point of least norm in the convex hull of ``k`` vectors, from their Gram matrix.

    Minimises ``lam' gram lam`` over ``lam >= 0``, ``sum lam = 1``, exactly (active set, float64), for matrices of any
    rank and any scale, all matrices of the batch together. With ``d = sum_j lam_j v_j`` every ``v_j . d`` is at least
    ``|d|^2``. Where the weights are not unique the result is still deterministic; the rules are at
    :func:`fl_lightning.ops.min_norm`, which also returns the optimality gap.

    Args:
        gram: ``[..., k, k]`` floating point, symmetric positive semi-definite up to rounding, ``k >= 1``. Gram matrices
            formed in float32 are often indefinite; feed float64 ones.

    Returns:
        ``[..., k]`` float64 on the device of ``gram``.

    Raises:
        TypeError: ``gram`` is not floating point.
        ValueError: ``gram`` has the wrong shape or contains NaN or infinity.
    """
    if gram.dim() < 2 or gram.shape[-1] != gram.shape[-2] or gram.shape[-1] == 0:
        raise ValueError(f"gram must have shape [..., k, k] with k >= 1, found {list(gram.shape)}")
    if not gram.is_floating_point():
        raise TypeError(f"gram must be floating point, found {gram.dtype}")
    lam, gap = ops.min_norm(gram.reshape(-1, *gram.shape[-2:]).to(torch.float64))
    bad = gap.isnan().nonzero()
    if len(bad):
        raise ValueError(f"gram must be finite, found NaN or infinity in {len(bad)} of {len(gap)} matrices")
    return lam.reshape(gram.shape[:-1])
