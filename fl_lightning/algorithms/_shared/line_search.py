# SPDX-License-Identifier: Apache-2.0
"""The step length of FedMDFG (Algorithm 2): backtracking on all clients' losses."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from fl_lightning.algorithms._shared.common_descent import loss_angle

_ROUNDING = 1e-6  # relative error of the shortest length to try, which comes from inner products; lengths are halved


def line_search(
    losses_after: Callable[[float], Tensor], before: Tensor, demand: Tensor, fairer: bool, highest: float, lowest: float
) -> tuple[float, int] | None:
    """The first of ``highest``, ``highest / 2``, ... after which every loss has fallen as demanded.

    If there is none down to ``lowest``: the longest that lowers the sum of the losses, else the one with the least sum.

    Args:
        losses_after: losses ``[m]`` after a step of a given length.
        before: ``[m]`` losses now.
        demand: ``[m]`` least fall of the losses per unit of length; negative numbers let them rise.
        fairer: the angle between the losses and ``(1, ..., 1)`` must shrink, too.
        highest: first length to try.
        lowest: shortest length to try.

    Returns:
        The length and the number of trials; ``None`` if no trial had finite losses.
    """
    length, trials, angle = highest, list[tuple[float, float]](), loss_angle(before)  # H
    while length >= lowest * (1 - _ROUNDING):  # line 4
        after = losses_after(length)  # lines 5 and 6
        trials.append((length, float(after.sum())))  # line 7
        enough = bool((before - after >= length * demand).all())  # line 8
        if enough and (not fairer or loss_angle(after) < angle):  # line 9
            return length, len(trials)
        length /= 2  # line 14
    finite = [trial for trial in trials if math.isfinite(trial[1])]
    lower = [trial for trial in finite if trial[1] < float(before.sum())]
    if not finite:
        return None
    chosen = lower[0] if lower else min(finite, key=lambda trial: trial[1])  # lines 16 to 21
    return chosen[0], len(trials)
