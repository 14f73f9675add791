# SPDX-License-Identifier: Apache-2.0
"""Active-set search for points of least norm in convex hulls, many small Gram matrices in lockstep.

For one Gram matrix ``G`` the search keeps a support ``S`` of affinely independent rows and a point ``lam`` on the
simplex with that support, and lowers ``lam' G lam`` with every exchange, as in P. Wolfe, "Finding the nearest point in
a polytope", Mathematical Programming 11 (1976). Its linear algebra is one symmetric tableau per matrix: the bordered
matrix ``[[G, 1], [1', 0]]`` swept (Gauss-Jordan) on ``S`` and the border. With ``b`` the border's index it holds

* ``T[S, b]``: minus the coefficients ``y`` of the point of least norm in the affine hull of ``S``;
* ``T[b, b]``: that point's squared norm ``mu``;
* ``T[b, j]``, ``j`` outside: the slack ``(G y)_j - mu``; the search ends when none is negative;
* ``T[j, j]``, ``j`` outside: the squared distance of row ``j`` from the affine hull of ``S``;
* ``T[S, j]``, ``j`` outside: the affine coefficients of row ``j``'s projection on that hull.

Everything is elementwise arithmetic over the batch, so a matrix gives the same bits alone, in any batch and with any
number of threads. The row of the border is refined against ``G`` itself before the search believes that it is done.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# All relative to squared norms of rows, which a float64 Gram matrix knows to about 1e-16.
_SLACK = 2e-15  # a slack above minus this (times the norms of the rows in it) is rounding
_DEPENDENT = 1e-13  # a row so near the hull of the support is exchanged for a member, never added
_FLOOR = 1e-15  # smallest pivot: like adding that much to the diagonal
_REFINEMENTS = 2


def search(gram: Floats) -> Floats:
    """Minimises ``lam' G lam`` over the simplex for ``[B, k, k]`` matrices, scaled to a mean diagonal near 1.

    They are symmetric and finite. The result ``[B, k]`` is nonnegative; rows sum to 1 up to rounding. It is optimal
    where the matrix is positive semi-definite, otherwise some point of the simplex.
    """
    batch, k, _ = gram.shape
    result = np.zeros((batch, k))
    state = _start(gram)
    # Only an indefinite matrix can overflow; what comes of it is caught at the end.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # The proven bound on the number of moves is finite but huge; in practice they are about as many as the members
        # of the final support. The cap is for indefinite matrices, where the objective need not fall.
        for _ in range(5 * k + 50):
            done = _advance(state)
            if done.any():
                result[state.ids[done]] = state.lam[done]
                state = state.select(np.flatnonzero(~done))
            if len(state.ids) == 0:
                break
    result[state.ids] = state.lam
    total = result.sum(1)
    lost = ~(np.isfinite(total) & (total > 0.0))
    result[lost] = np.eye(k)[np.diagonal(gram[lost], axis1=1, axis2=2).argmin(1)]
    result /= result.sum(1, keepdims=True)
    return result


@dataclass
class _State:
    """One row per unfinished matrix."""

    gram: Floats  # [n, k, k]
    tableau: Floats  # [n, k + 1, k + 1]
    lam: Floats  # [n, k]
    active: Bools  # [n, k], the support S
    fresh: Bools  # [n], the tableau's border was refined since the last pivot
    square: Floats  # [n, k], squared norms of the rows
    ids: Ints  # [n], place in the batch

    def select(self, rows: Ints) -> _State:
        return _State(*(getattr(self, field.name)[rows] for field in fields(self)))


def _start(gram: Floats) -> _State:
    """Starts from the shortest row: then the differences to it, which the tableau holds, lose the least accuracy."""
    batch, k, _ = gram.shape
    every = np.arange(batch)
    square = np.maximum(np.diagonal(gram, axis1=1, axis2=2), 0.0)
    first = square.argmin(1)
    row, mu = gram[every, first], square[every, first]
    tableau = np.empty((batch, k + 1, k + 1))
    tableau[:, :k, :k] = gram - row[:, :, None] - row[:, None, :] + mu[:, None, None]
    tableau[:, :k, k] = tableau[:, k, :k] = row - mu[:, None]
    tableau[:, k, k] = mu
    tableau[every, first, :] = tableau[every, :, first] = 1.0
    tableau[every, first, first] = 0.0
    tableau[every, first, k] = tableau[every, k, first] = -1.0
    active = np.zeros((batch, k), dtype=np.bool_)
    active[every, first] = True
    return _State(gram, tableau, active.astype(np.float64), active, np.zeros(batch, dtype=np.bool_), square, every)


def _advance(state: _State) -> Bools:
    """Makes one move for each matrix, and says which are solved.

    A move is one of: go towards the affine minimiser and drop the first member that reaches zero; arrive there and add
    a row; arrive there and exchange a member for a row; arrive there, find nothing to add, and refine.
    """
    tableau, active = state.tableau, state.active
    k = active.shape[1]
    every = np.arange(len(active))

    # Towards the minimiser of the affine hull, as far as the simplex allows.
    target = np.where(active, -tableau[:, :k, k], 0.0)
    fall = state.lam - target
    ratio = np.where(active & (target <= 0.0), np.where(fall > 0.0, state.lam / fall, 0.0), np.inf)
    drop = ratio.argmin(1)
    length = ratio[every, drop]
    blocked = length < np.inf
    state.lam = np.where(blocked[:, None], state.lam - np.minimum(length, 1.0)[:, None] * fall, target)

    # Which row to add: the one whose line from here would lower the objective most.
    slack = tableau[:, k, :k]
    distance = np.diagonal(tableau, axis1=1, axis2=2)[:, :k]
    norm = np.sqrt(state.square)
    length = (state.lam * norm).sum(1)[:, None]
    noise = _SLACK * length * (norm + length)
    gain = slack * slack / np.maximum(distance, _DEPENDENT * state.square)
    gain = np.where(~active & (slack < -noise) & ~blocked[:, None], gain, -1.0)
    add = gain.argmax(1)
    entering = gain[every, add] >= 0.0

    # How far the new row's weight can grow before a member of the support reaches zero.
    share = np.where(active, tableau[every, :k, add], 0.0)
    ratio = np.where(share > 1e-12, state.lam / share, np.inf)
    exchange = ratio.argmin(1)
    distant = distance[every, add] > _DEPENDENT * state.square[every, add]
    wanted = np.where(distant, -slack[every, add] / distance[every, add], np.inf)
    room = ratio[every, exchange]
    exchanging = entering & (room < wanted)
    rows = np.flatnonzero(exchanging)
    state.lam[rows] -= room[rows, None] * share[rows]
    state.lam[rows, add[rows]] = room[rows]
    drop = np.where(exchanging, exchange, drop)

    rows = np.flatnonzero(blocked | exchanging)
    state.lam[rows, drop[rows]] = 0.0
    np.maximum(state.lam, 0.0, out=state.lam)
    _sweep(tableau, rows, drop[rows], active, state.square)
    rows = np.flatnonzero(entering)
    _sweep(tableau, rows, add[rows], active, state.square)

    settled = ~(blocked | entering)
    done: Bools = settled & state.fresh
    state.fresh = settled
    _refine(state, np.flatnonzero(settled & ~done))
    return done


def _sweep(tableau: Floats, rows: Ints, pivots: Ints, active: Bools, square: Floats) -> None:
    """Brings one row per matrix into the support, or takes it out when it is in."""
    if rows.size == 0:
        return
    part = tableau if rows.size == len(tableau) else tableau[rows]
    every = np.arange(len(part))
    leaving = active[rows, pivots]
    column = part[every, :, pivots]
    pivot = column[every, pivots]
    floor = _FLOOR * np.maximum(square[rows, pivots], np.finfo(np.float64).tiny)
    pivot = np.where(leaving, np.minimum(pivot, -1e-300), np.maximum(pivot, floor))
    scaled = column / pivot[:, None]
    part -= column[:, :, None] * scaled[:, None, :]
    scaled[leaving] *= -1.0
    scaled[every, pivots] = -1.0 / pivot
    part[every, :, pivots] = scaled
    part[every, pivots, :] = scaled
    if part is not tableau:
        tableau[rows] = part
    active[rows, pivots] = ~leaving


def _refine(state: _State, rows: Ints) -> None:
    """Recomputes the border of some tableaus from the Gram matrix, by iterative refinement with the swept inverse."""
    if rows.size == 0:
        return
    k = state.active.shape[1]
    gram, active, tableau = state.gram[rows], state.active[rows], state.tableau[rows]
    inverse = -tableau[:, :k]  # of the bordered matrix, in the columns of S and of the border
    y = np.where(active, inverse[:, :, k], 0.0)
    for _ in range(_REFINEMENTS):
        product = (gram * y[:, None, :]).sum(2)
        mu = (product * y).sum(1) / y.sum(1)
        residual = np.where(active, mu[:, None] - product, 0.0)
        change = (inverse[:, :, :k] * residual[:, None, :]).sum(2) + inverse[:, :, k] * (1.0 - y.sum(1))[:, None]
        y = np.where(active, y + change, 0.0)
    product = (gram * y[:, None, :]).sum(2)
    mu = (product * y).sum(1) / y.sum(1)
    border = np.where(active, -y, product - mu[:, None])
    state.tableau[rows, :k, k] = state.tableau[rows, k, :k] = border
    state.tableau[rows, k, k] = mu
