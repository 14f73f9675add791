# SPDX-License-Identifier: Apache-2.0
"""Centred clipping: Learning from History for Byzantine Robust Optimization.

Sai Praneeth Karimireddy, Lie He, Martin Jaggi. ICML 2021. https://arxiv.org/abs/2012.10333
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms.guards.base import Guard, Verdict
from fl_lightning.algorithms.guards.norms import clipping
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.ops.rows import accumulation_device


class CentredClipping(Guard):
    """``x_i <- v + (x_i - v) min(1, tau / ||x_i - v||)``: rows are cut to a ball around the last round's robust mean.

    The mean of the cut rows is the next centre (equation 5); the first is zero. With more ``iterations``, the mean of
    one is the centre of the next, within a round. A fair rule sees the cut rows, which stay apart.

    The paper clips momenta that workers keep. Here the rows are updates of local training.

    Args:
        radius: tau.
        iterations: the paper's l.

    Attributes:
        center: ``v`` ``[n]``; ``None`` before the first round.

    Raises:
        ValueError: an argument is out of range.
    """

    reads = "gram"

    center = server_state(Tensor)

    @checked(radius=Bounds(above=0), iterations=Bounds(1))
    def __init__(self, radius: float, iterations: int = 1) -> None:
        self.radius, self.iterations = radius, iterations

    def judge(self, cohort: Cohort) -> Verdict:
        """See the class."""
        updates, m = cohort.updates, len(cohort)
        v = torch.zeros_like(updates.rows[0]) if self.center is None else self.center.to(updates.rows)
        squares = updates.squared_distances(v)
        each = torch.eye(m + 1, dtype=torch.float64)[:m]
        c = torch.zeros(m + 1, dtype=torch.float64)
        c[m] = 1  # the centre as a mean of the rows and v
        for _ in range(self.iterations):
            center, to_all = c, squares @ c
            distances = (to_all[:m] - c @ to_all / 2).clamp_min(0).sqrt()  # because the c_i add up to 1
            scale = clipping(distances, self.radius)
            c = center + (scale[:, None] * (each - c)).mean(0)
        self.center = _combined(updates, c, v)
        scalars = {"clipped": float((scale < 1).sum())}
        return Verdict(scale=scale, center=_combined(updates, center, v), scalars=scalars)


def _combined(updates: UpdateMatrix, c: Tensor, v: Tensor) -> Tensor:
    m = len(updates)
    if not bool(c[:m].any()):
        return v
    exact = accumulation_device(v) == v.device  # rounded once, where there is float64
    return updates.combine(c[:m], out=(v.double() if exact else v) * float(c[m])).to(v.dtype)
