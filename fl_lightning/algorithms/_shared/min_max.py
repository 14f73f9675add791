# SPDX-License-Identifier: Apache-2.0
"""The directions of FCFL's two stages, by their coefficients (equations 12, 13 and 15)."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.ops.solvers import linear_program, min_norm


def budgets_hold(excess: Tensor, smooth: float | None) -> bool:
    """Whether no disparity exceeds its budget (equation 11b).

    Args:
        excess: ``[m]`` how far the disparities exceed their budgets.
        smooth: ``d`` of the soft maximum that must not be positive; ``None`` for the maximum itself.
    """
    if len(excess) > 0 and smooth is not None:
        return float(smooth * torch.logsumexp(excess / smooth, 0)) <= 0
    return bool((excess <= 0).all())


def min_max(gram: Tensor, c_loss: Tensor, c_disparity: Tensor, feasible: bool) -> float:
    """Share ``a`` of the disparity gradient in the direction ``(1 - a) S^T c_loss + a S^T c_disparity`` of stage 1.

    The closed forms of the linear programs in equations 12 (``feasible``) and 13, which have one variable.
    """
    ll, lg, gg = (float(v @ gram @ w) for v, w in ((c_loss, c_loss), (c_loss, c_disparity), (c_disparity, c_disparity)))
    if feasible:
        return 0.0 if ll >= lg else 1.0
    if lg >= 0:
        return 1.0 if gg >= lg else 0.0
    return ll / (ll - lg)  # at a right angle to the loss gradient


def pareto(gram: Tensor, losses: Tensor, bounds: Tensor, spanned: Tensor) -> tuple[Tensor, bool]:
    """Coefficients of stage 2 (equation 15), and whether the shortest vector of the hull had to take over.

    The direction lowers the mean loss most, in the hull of the clients' loss gradients and ``spanned``, without a rise
    of any loss or bound.

    Args:
        gram: ``K``, ``[k, k]``.
        losses: ``[m, k]`` coefficients of the clients' loss gradients.
        bounds: ``[b, k]`` of the gradients of the other functions that must not rise.
        spanned: ``[d, k]`` of further gradients in the hull.
    """
    constraints, hull = torch.cat([losses, bounds]), torch.cat([losses, spanned])
    slopes = hull @ gram  # row j: products of all rows of S with direction j of the hull
    solution = linear_program(slopes @ losses.mean(0), -(constraints @ slopes.T), torch.zeros(len(constraints)))
    if solution.status == "optimal":
        return solution.x @ hull, False
    return min_norm(slopes @ hull.T) @ hull, True
