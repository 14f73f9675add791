# SPDX-License-Identifier: Apache-2.0
"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

H. Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Aguera y Arcas. AISTATS 2017.
https://arxiv.org/abs/1602.05629
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.weighting import weighted_mean
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import StepReport
from fl_lightning.arguments import checked
from fl_lightning.core.cohort import Cohort


class FedAvg(ServerRule):
    """The weighted mean of the clients' updates (Algorithm 1).

    Args:
        weighting: ``"samples"`` weighs a client by its number of training samples (the paper), ``"uniform"`` all alike.
    """

    reads = "sums"
    averages = True

    @checked()
    def __init__(self, weighting: Literal["samples", "uniform"] = "samples") -> None:
        self.weighting = weighting

    def known_weights(self, sizes: Tensor) -> Tensor:
        """``p_i`` of :meth:`aggregate`."""
        return sizes / sizes.sum() if self.weighting == "samples" else torch.full_like(sizes, 1.0 / len(sizes))

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_i p_i u_i`` with ``p_i = n_i / n`` or ``1 / m``."""
        weights = FedAvg.known_weights(self, cohort.sizes)  # not those of a class that does more to the step
        step = weighted_mean(cohort, weights)
        self.report = StepReport(weights=weights)
        return step
