# SPDX-License-Identifier: Apache-2.0
"""Decisions in coefficient space: batches of small problems on Gram matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.ops import _check, _library  # noqa: F401  (the import registers the ops)


@torch.no_grad()
def project_conflicts(gram: Tensor, order: Tensor, keep: Tensor) -> Tensor:
    """Projects each update off the updates that it conflicts with, one after the other (FedFV, Algorithm 2).

    Update ``i`` starts as itself. For each ``j`` in ``order`` other than ``i``: if the current, projected update ``i``
    has a negative inner product with the original update ``j``, its component along update ``j`` is removed. Updates of
    zero norm are never projected on. A NaN in a Gram matrix makes NaN of the coefficients that it decides, and may of
    others of that matrix.

    Args:
        gram: ``[B, m, m]`` float64, symmetric; batches are independent.
        order: ``[m]`` int64, a permutation of the clients (checked when it is on the CPU).
        keep: ``[m]`` bool; these updates are not changed, yet others are projected off them.

    Returns:
        ``[B, m, m]`` float64 on the Gram's device; row ``i`` holds the coefficients of projected update ``i`` in terms
        of the original updates.

    Raises:
        TypeError: a dtype is not allowed.
        ValueError: a shape or device is wrong, or ``order`` is not a permutation.
    """
    _square("gram", gram)
    m = gram.shape[-1]
    _check.check_shape("order", order, (m,))
    _check.check_dtype("order", order, torch.int64)
    _check.check_shape("keep", keep, (m,))
    _check.check_dtype("keep", keep, torch.bool)
    _check.reachable("order", order, gram)
    _check.permutation("order", order)
    _check.reachable("keep", keep, gram)
    coeff: Tensor = torch.ops.fl_lightning.project_conflicts(gram, order, keep)
    return coeff


@torch.no_grad()
def min_norm(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Points of least norm in convex hulls: minimises ``lam' gram lam`` over the unit simplex, exactly.

    One active-set search per matrix, all of them in lockstep; each matrix is scaled by its mean diagonal first. The
    point is unique, its coefficients are not where the rows are affinely dependent. Ties fall to the lowest index: of
    equal rows one gets all the weight, and so does one row of zero norm. For two rows there is a closed form, and there
    equal rows get one half each. The pure-torch implementation searches on the host, whatever the device.

    Args:
        gram: ``[B, k, k]`` float64, symmetric (only the symmetric part counts) and positive semi-definite up to
            rounding.

    Returns:
        ``lam`` ``[B, k]`` float64: nonnegative, each row sums to 1 within 1e-12. ``gap`` ``[B]`` float64: how far
        ``lam`` is from optimal, ``max_j (lam' gram lam - (gram lam)_j)`` in units of the mean diagonal; in these units
        ``lam' gram lam`` exceeds the minimum by at most twice that. It is at rounding level for a positive
        semi-definite matrix and shows the defect of one that is not. A matrix with a NaN or an infinity gets NaN for
        both.

    Raises:
        TypeError: ``gram`` is not float64.
        ValueError: ``gram`` has the wrong shape.
    """
    _square("gram", gram)
    lam, gap = torch.ops.fl_lightning.min_norm(gram)
    return lam, gap


def _square(name: str, gram: Tensor) -> None:
    if not isinstance(gram, Tensor):
        raise TypeError(f"{name} must be a tensor, found {type(gram).__name__}")
    if gram.dim() != 3 or gram.shape[1] != gram.shape[2] or gram.shape[1] == 0:
        raise ValueError(f"{name} must have shape [B, k, k] with k >= 1, found {list(gram.shape)}")
    _check.check_dtype(name, gram, torch.float64)
