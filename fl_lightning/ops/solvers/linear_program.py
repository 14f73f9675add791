# SPDX-License-Identifier: Apache-2.0
"""Small linear programs over the simplex (the direction of FCFL's second stage, the adversary of FA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.arguments import Bounds, checked

Floats = npt.NDArray[np.float64]

_ZERO = 1e-12  # of reduced costs and violated bounds, once rows and columns are scaled to order one
_PIVOT = 1e-9  # smaller entries of a row may be nothing but rounding
_PATIENCE = 50  # pivots in a row without progress after which only Bland's rule is safe from cycles
_EQUILIBRATIONS = 3
_VANISHING = 1e-150  # smaller coefficients, beside the largest, count as 0: scaling them would overflow


@checked(value=Bounds())
@dataclass(frozen=True)
class LinearProgram:
    """What :func:`linear_program` found.

    Attributes:
        x: ``[k]`` float64 on the CPU; zeros unless ``status`` is ``"optimal"``.
        value: the objective at ``x``.
        status: ``"stalled"`` means that the limit on pivots was reached, or that rounding spoiled the vertex.
    """

    x: Tensor
    value: float
    status: Literal["optimal", "infeasible", "stalled"]


@checked(max_pivots=Bounds(0))
def linear_program(
    objective: Tensor, matrix: Tensor, bounds: Tensor, weights: Tensor | None = None, max_pivots: int | None = None
) -> LinearProgram:
    """Maximises ``objective . x`` where ``matrix x <= bounds``, ``x >= 0`` and ``weights . x = 1``.

    Dual simplex method (Lemke 1954) in float64: the best corner of the simplex is where it starts, and every pivot
    repairs a violated bound, so that no first phase is needed. Rows and columns are scaled by powers of two to entries
    near one, and the final vertex is solved for from the numbers given. Meant for up to a few hundred variables. Where
    several vertices are optimal the result is one of them, always the same one.

    Args:
        objective: ``[k]`` floating point, ``k >= 1``.
        matrix: ``[q, k]``; ``q`` may be 0.
        bounds: ``[q]``.
        weights: ``[k]`` positive; default ones, the unit simplex.
        max_pivots: limit on pivots; default ``100 + 20 (k + q)``.

    Raises:
        ValueError: shapes do not fit, something is not finite, or a weight is not positive.
    """
    c = _array("objective", objective, (len(objective),) if objective.dim() == 1 and len(objective) else ("k >= 1",))
    k = len(c)
    a = _array("matrix", matrix, (len(matrix) if matrix.dim() else 0, k))
    b = _array("bounds", bounds, (len(a),))
    w = np.ones(k) if weights is None else _array("weights", weights, (k,))
    if not (w > 0).all():
        raise ValueError(f"weights must be positive, found {w.tolist()}")

    # In units of the corners x_j = 1 / w_j the constraint is that of the unit simplex.
    a = np.where(np.abs(a) < _VANISHING * np.abs(a).max(initial=0.0), 0.0, a)
    row, column = _scales(a / w)
    share = column / column.max()  # x_j = share_j y_j / w_j, so that share . y = 1
    a = a / w * row[:, None] * column
    b = b * row * column.max()
    cost = c / w * share
    cost = cost / (float(np.abs(cost).max()) or 1.0)
    found = _dual_simplex(cost, a, b, share, 100 + 20 * (k + len(a)) if max_pivots is None else max_pivots)
    if isinstance(found, str):
        return LinearProgram(torch.zeros(k, dtype=torch.float64), 0.0, found)
    x = found * share / w
    x /= w @ x
    return LinearProgram(torch.from_numpy(x), float(c @ x), "optimal")


def _dual_simplex(
    cost: Floats, a: Floats, b: Floats, share: Floats, budget: int
) -> Floats | Literal["infeasible", "stalled"]:
    """Tableau ``B^-1 [A I | b]`` with ``share . y = 1`` as its first row; the columns behind ``k`` are slacks."""
    k, q = len(cost), len(b)
    matrix = np.zeros((q + 1, k + q))
    matrix[0, :k], matrix[1:, :k], matrix[1:, k:] = share, a, np.eye(q)
    right = np.concatenate([[1.0], b])
    first = int((cost / share).argmax())
    basis = np.concatenate([[first], k + np.arange(q)])
    t = np.hstack([matrix, right[:, None]])
    reduced = np.concatenate([cost, np.zeros(q + 1)])
    _pivot(t, reduced, 0, first)
    idle = 0
    for _ in range(budget + 1):
        values = t[:, -1]
        y = np.zeros(k + q)
        y[basis] = np.abs(values)
        # A slack is a difference: its rounding error follows what was subtracted, in which zeros are not exact either.
        size = np.concatenate([np.full(k, y[:k].max()), np.abs(a) @ (y[:k] + 1e-3 * y[:k].max()) + np.abs(b)])
        broken = np.flatnonzero(values < -_ZERO * size[basis])
        if not len(broken):
            x = _vertex(matrix, right, basis, values)[:k]
            sound = a @ x - b <= _PIVOT * (np.abs(a) @ (x + 1e-3 * x.max()) + np.abs(b))
            return x if sound.all() else "stalled"
        bland = idle > _PATIENCE
        leaving = int(broken[basis[broken].argmin() if bland else values[broken].argmin()])
        entering = np.flatnonzero(t[leaving, :-1] < -_PIVOT)
        if not len(entering):
            return "infeasible"
        ratios = np.minimum(reduced[entering], 0.0) / t[leaving, entering]
        smallest = ratios.min()
        tied = entering[ratios <= smallest + _ZERO]
        # Among ties the largest pivot is the most accurate; Bland's rule needs the lowest index.
        chosen = int(tied[0] if bland else tied[t[leaving, tied].argmin()])
        _pivot(t, reduced, leaving, chosen)
        basis[leaving] = chosen
        idle = idle + 1 if smallest <= _ZERO else 0
    return "stalled"


def _pivot(t: Floats, reduced: Floats, row: int, column: int) -> None:
    t[row] /= t[row, column]
    factors = t[:, column].copy()
    factors[row] = 0.0
    t -= np.outer(factors, t[row])
    reduced -= reduced[column] * t[row]


def _vertex(matrix: Floats, right: Floats, basis: npt.NDArray[np.int64], values: Floats) -> Floats:
    """The basic solution, free of the rounding that pivots gathered."""
    x = np.zeros(matrix.shape[1])
    try:
        x[basis] = np.linalg.solve(matrix[:, basis], right)
    except np.linalg.LinAlgError:
        x[basis] = values
    return np.maximum(x, 0.0)


def _scales(a: Floats) -> tuple[Floats, Floats]:
    """Factors of rows and columns that bring their largest entries near one; powers of two, so that they are exact."""
    row, column = np.ones(a.shape[0]), np.ones(a.shape[1])
    for _ in range(_EQUILIBRATIONS):
        row *= _inverse(np.abs(a * row[:, None] * column).max(axis=1, initial=0.0))
        column *= _inverse(np.abs(a * row[:, None] * column).max(axis=0, initial=0.0))
    return row, column


def _inverse(size: Floats) -> Floats:
    return np.asarray(np.exp2(-np.floor(np.log2(np.where(size > 0, size, 1.0)))))


def _array(name: str, value: Tensor, shape: tuple[int | str, ...]) -> Floats:
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have shape [{', '.join(map(str, shape))}], found {list(value.shape)}")
    array: Floats = value.detach().cpu().to(torch.float64).numpy()
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, found NaN or infinity")
    return array
