# SPDX-License-Identifier: Apache-2.0
"""Points of the unit simplex: of least norm (the QP of MGDA), the same within bounds (FedMGDA+), and the nearest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.arguments import checked

_Floats = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]

_ENOUGH = 1e-13  # optimality gap at which the search ends, in units of the mean diagonal
_RIDGE = 1e-13  # added to the diagonal of a step's equations, so that they have a solution: the step is a proximal one
_SLACK = 1e-12  # by how much the sums of the bounds may miss 1


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


@checked()
def project_simplex(v: Tensor) -> Tensor:
    """The nearest point of the unit simplex, along the last dimension.

    With the entries sorted in decreasing order the result is ``max(v - shift, 0)``, where ``shift`` makes the largest
    possible leading part sum to one (Held, Wolfe and Crowder, Mathematical Programming 6, 1974).

    Args:
        v: ``[..., k]`` floating point, ``k >= 1``.

    Returns:
        ``[..., k]`` in the dtype of ``v``: nonnegative, sums to one up to rounding.

    Raises:
        TypeError: ``v`` is not floating point.
        ValueError: ``v`` has no entries along its last dimension, or contains NaN or infinity.
    """
    if v.dim() == 0 or v.shape[-1] == 0:
        raise ValueError(f"v must have shape [..., k] with k >= 1, found {list(v.shape)}")
    if not v.is_floating_point():
        raise TypeError(f"v must be floating point, found {v.dtype}")
    if not bool(v.isfinite().all()):
        raise ValueError("v must be finite, found NaN or infinity")
    # Only differences matter; taken from the largest entry they cannot overflow, and large offsets cost no accuracy.
    centred = v.to(torch.float64) - v.amax(-1, keepdim=True).to(torch.float64)
    sorted_values = centred.sort(-1, descending=True).values
    counts = torch.arange(1, v.shape[-1] + 1, dtype=torch.float64, device=v.device)
    shifts = (sorted_values.cumsum(-1) - 1.0) / counts
    last = (sorted_values > shifts).sum(-1, keepdim=True) - 1
    return (centred - shifts.gather(-1, last)).clamp_min(0.0).to(v.dtype)


@checked()
def box_min_norm(gram: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Weights of the point of least norm, each within bounds of its own.

    Minimises ``lam' gram lam`` over ``lower <= lam <= upper``, ``sum lam = 1`` by a primal active-set search with
    proximal Newton steps (Nocedal and Wright, Numerical Optimization, 2006, section 16.5), in float64 and independent
    of the matrix's scale. The point is unique; where the weights are not, the result is still deterministic. For bounds
    0 and 1, :func:`min_norm` is exact to the last bits and takes batches.

    Args:
        gram: ``[k, k]`` floating point, symmetric positive semi-definite up to rounding, ``k >= 1``.
        lower: ``[k]``, summing to at most 1.
        upper: ``[k]``, not below ``lower``, summing to at least 1.

    Returns:
        ``[k]`` float64 on the device of ``gram``. For a positive semi-definite matrix its objective exceeds the least
        one by at most 1e-11 of the mean diagonal.

    Raises:
        ValueError: a shape is wrong, an entry is NaN or infinite, or no weights keep to the bounds.
    """
    k = gram.shape[-1] if gram.dim() else 0
    if k == 0 or gram.shape != (k, k):
        raise ValueError(f"gram must have shape [k, k] with k >= 1, found {list(gram.shape)}")
    for name, tensor in (("gram", gram), ("lower", lower), ("upper", upper)):
        if name != "gram" and tensor.shape != (k,):
            raise ValueError(f"{name} must have shape [{k}], found {list(tensor.shape)}")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} must be finite, found NaN or infinity")
    low, high = (bound.detach().to("cpu", torch.float64).numpy() for bound in (lower, upper))
    if bool((low > high).any()) or not low.sum() - _SLACK <= 1 <= high.sum() + _SLACK:
        raise ValueError(
            "lower and upper must leave room for weights that sum to 1, found lower sums to "
            f"{low.sum():g}, upper to {high.sum():g}, {int((low > high).sum())} entries of lower above upper"
        )
    matrix = gram.detach().to("cpu", torch.float64).numpy()
    mean = np.trace(matrix) / k
    scaled = (matrix + matrix.T) / (2 * mean if mean > 0 else 2)
    return torch.from_numpy(_search(scaled, low, high)).to(gram.device)


def _search(gram: _Floats, lower: _Floats, upper: _Floats) -> _Floats:
    """Walks from face to face of the feasible set; ``gram`` has a mean diagonal of 1."""
    room = upper - lower
    x = np.clip(lower + room * ((1 - lower.sum()) / room.sum() if room.sum() > 0 else 0.0), lower, upper)
    movable = room > 0
    free = movable.copy()
    best, least, ridge, converged = x, np.inf, _RIDGE, False
    for _ in range(20 * len(x) + 100):
        slope = _slope(gram, x)
        gap = _gap(slope, x, lower, upper)
        stuck = converged and gap > least / 2
        if gap < least:
            best, least = x, gap
        if gap <= _ENOUGH or stuck:
            break
        move = _face_step(gram, slope, free, ridge)
        if move is None:  # only matrices with a negative eigenvalue come here
            ridge *= 100
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            reach = np.where(move < 0, (lower - x) / move, np.where(move > 0, (upper - x) / move, np.inf))
        first = int(reach.argmin())
        x = np.clip(x + min(reach[first], 1.0) * move, lower, upper)
        converged = reach[first] >= 1 and not _release(_slope(gram, x), x, free, lower, movable)
        if reach[first] < 1:
            x[first] = lower[first] if move[first] < 0 else upper[first]
            free[first] = False
    return best


def _release(slope: _Floats, x: _Floats, free: _Bools, lower: _Floats, movable: _Bools) -> bool:
    """Frees the bound weight that the objective would most like to move inwards, if there is one.

    Never one whose bounds coincide: it has no inside, and would be bound again and freed again without end.
    """
    level = slope[free].mean()  # the multiplier of the sum
    wish = np.where(x <= lower, level - slope, slope - level)
    wish[free | ~movable] = 0.0
    chosen = wish.argmax()
    free[chosen] |= wish[chosen] > 0
    return bool(wish[chosen] > 0)


def _face_step(gram: _Floats, slope: _Floats, free: _Bools, ridge: float) -> _Floats | None:
    """Newton step to the least objective with the sum and all bound weights kept; ``None`` if there is none."""
    members = np.flatnonzero(free)
    first = members[gram.diagonal()[members].argmin()]  # differences to the shortest row lose the least accuracy
    others = members[members != first]
    towards = gram[first, others]
    edges = gram[np.ix_(others, others)] - towards[:, None] - towards + gram[first, first]
    edges += ridge * (np.eye(len(others)) + 1.0)
    part = _solve(edges, slope[first] - slope[others])
    if part is None:
        return None
    move = np.zeros_like(slope)
    move[others], move[first] = part, -part.sum()
    return move if (slope * move).sum() <= 0 else None


def _solve(matrix: _Floats, right: _Floats) -> _Floats | None:
    """Solves equations of a positive definite matrix, ``None`` for others.

    Elimination without pivots, elementwise: the bits do not depend on the number of threads, as those of LAPACK do.
    """
    table = np.concatenate([matrix, right[:, None]], axis=1)
    for j in range(len(right)):
        if not table[j, j] > 0:
            return None
        table[j + 1 :, j:] -= (table[j + 1 :, j] / table[j, j])[:, None] * table[j, j:]
    result = np.zeros_like(right)
    for j in reversed(range(len(right))):
        result[j] = (table[j, -1] - (table[j, j + 1 : -1] * result[j + 1 :]).sum()) / table[j, j]
    return result


def _slope(gram: _Floats, x: _Floats) -> _Floats:
    product: _Floats = (gram * x).sum(1)
    return product


def _gap(slope: _Floats, x: _Floats, lower: _Floats, upper: _Floats) -> float:
    """By how much ``x' G x`` is at most too large, halved: ``x`` against the vertex that ``slope`` likes best."""
    order = slope.argsort(kind="stable")
    room = (upper - lower)[order]
    vertex = lower.copy()
    vertex[order] += np.clip(1 - lower.sum() - (room.cumsum() - room), 0.0, room)
    return float((slope * (x - vertex)).sum())
