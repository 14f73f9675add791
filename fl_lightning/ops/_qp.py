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
    _check.check_shape("order", order, (m,), torch.int64)
    _check.check_shape("keep", keep, (m,), torch.bool)
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


@torch.no_grad()
def common_descent(
    gram: Tensor,
    online: int,
    scale: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    zero_row: float,
    zero_direction: float,
    rounding: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Directions in which all clients' losses fall, for a batch of layers (FedMDFG, equation 7; FedLF, equation 8).

    Each is the shortest vector in the convex hull of scaled rows, and of a fair row ``sum_i weights[i] scale[i]
    rows[i]`` over the online clients. All that follows the Gram matrices is one call, and one launch on a GPU, which
    reads nothing back.

    Args:
        gram: ``[B, k, k]`` float64, the rows' Gram matrices; symmetric, of which the first rows are online.
        online: how many; those behind are remembered.
        scale: ``[B, k]`` factor of each row in the hull; 0 leaves the row out. ``None``: the rows that count, and the
            fair row, get the mean length of the online rows that count. A row counts if it is longer than ``zero_row``
            times the lower median of the online lengths that are not 0. A fair row that is ``zero_direction`` times
            shorter than its weights allow is left out.
        weights: ``[online]`` of the fair row; ``None``, or zeros, leave it out.
        zero_row: see ``scale``.
        zero_direction: a direction that is this many times shorter than the scaled online rows (root mean square)
            counts as zero.
        rounding: relative error of products of rows and of the step.

    Returns:
        ``coeff`` ``[B, k]`` float64: the direction's coefficients of the rows. ``solved`` ``[B]`` bool: it is not zero,
        and falls for every online row in the hull by more than rounding can turn around. A matrix without online rows
        in its hull has nothing to do: coefficients 0, solved. ``fair`` ``[B]`` bool: the hull has a fair row. A NaN or
        an infinity in the numbers of a matrix gives NaN, false and false.

    Raises:
        TypeError: a dtype is not allowed.
        ValueError: a shape, device or number is wrong.
    """
    _square("gram", gram)
    batch, k = gram.shape[:2]
    _check.integer("online", online, least=1, most=k)
    for name, numbers, shape in (("scale", scale, (batch, k)), ("weights", weights, (online,))):
        if numbers is not None:
            _check.check_shape(name, numbers, shape, torch.float64)
            _check.reachable(name, numbers, gram)
    for name, number in (("zero_row", zero_row), ("zero_direction", zero_direction), ("rounding", rounding)):
        _check.ratio(name, number)
    coeff, solved, fair = torch.ops.fl_lightning.common_descent(
        gram, online, scale, weights, zero_row, zero_direction, rounding
    )
    return coeff, solved, fair


def _square(name: str, gram: Tensor) -> None:
    _check.dense(name, gram)
    if gram.dim() != 3 or gram.shape[1] != gram.shape[2] or gram.shape[1] == 0:
        raise ValueError(f"{name} must have shape [B, k, k] with k >= 1, found {list(gram.shape)}")
    _check.check_dtype(name, gram, torch.float64)
