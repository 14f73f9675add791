# SPDX-License-Identifier: Apache-2.0
"""RFA: Robust Aggregation for Federated Learning.

Krishna Pillutla, Sham M. Kakade, Zaid Harchaoui. IEEE Transactions on Signal Processing 70 (2022).
https://arxiv.org/abs/1912.13445
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.guards.base import Guard, Rows, Verdict, all_the_same
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort


def weiszfeld(distances: Tensor, alpha: Tensor, smoothing: float, iterations: int) -> Tensor:
    """The smoothed Weiszfeld algorithm (Algorithm 2) on coefficients ``c [m]`` of sum 1: ``v = sum_i c_i w_i``.

    From squared distances ``[m, m]`` of the rows, so that iterations need no further pass over them, and weights
    ``alpha [m]`` of sum 1. Below the smoothing (the paper's nu) distances do not count as smaller.
    """
    c = alpha
    for _ in range(iterations):
        to_rows = distances @ c
        squares = to_rows - c @ to_rows / 2  # ||w_i - v||^2, because the c_i add up to 1
        beta = alpha / squares.clamp_min(0).sqrt().clamp_min(smoothing)
        c = beta / beta.sum()
    return c


class GeometricMedian(Guard):
    """The point whose weighted distances to all rows add up to the least, by the smoothed Weiszfeld algorithm.

    It is a mean of the rows in which far ones weigh little. With ``rows="same"`` every row becomes this point. With
    ``rows="own"``, row ``i`` is multiplied by ``c_i / alpha_i``, its weight in this point over its weight in the mean:
    the mean with the weights ``alpha`` is then the point. Rules that rescale rows by themselves (FedLF, FedMDFG,
    FedMGDA+) undo that.

    Where ``f`` of ``m`` rows lie together far away, an iteration leaves about ``f / (m - f)`` of how far they have
    moved the point. A third of the rows is so undone at any distance; close to half of them take more ``iterations``,
    the more the further away they are. Rows within ``smoothing`` of each other, such as updates that are as short, are
    averaged.

    Args:
        weighting: ``alpha``: ``"samples"`` weighs a client by its number of training samples (the paper), which it
            could lie about, ``"uniform"`` all alike.
        smoothing: the smallest distance that counts, the paper's nu.
        iterations: of the algorithm. The paper takes 3, because each is a round of communication there; here they cost
            nothing.
        rows: what becomes of the rows.

    Raises:
        ValueError: an argument is out of range.
    """

    reads = "gram"

    @checked(smoothing=Bounds(above=0), iterations=Bounds(1))
    def __init__(
        self,
        weighting: Literal["samples", "uniform"] = "samples",
        smoothing: float = 1e-6,
        iterations: int = 100,
        rows: Rows = "same",
    ) -> None:
        self.weighting, self.smoothing, self.iterations, self.rows = weighting, smoothing, iterations, rows

    def judge(self, cohort: Cohort) -> Verdict:
        """See the class."""
        sizes = cohort.sizes
        alpha = sizes / sizes.sum() if self.weighting == "samples" else torch.full_like(sizes, 1 / len(sizes))
        c = weiszfeld(cohort.updates.squared_distances(), alpha, self.smoothing, self.iterations)
        smallest = float((c / alpha).min())
        if self.rows == "same":
            return all_the_same(cohort.updates.combine(c), len(cohort), smallest_weight=smallest)
        return Verdict(scale=c / alpha, scalars={"smallest_weight": smallest})
