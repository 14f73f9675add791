# SPDX-License-Identifier: Apache-2.0
"""FedAve+FairReg: the scalarised baseline of FCFL.

Sen Cui, Weishen Pan, Jian Liang, Changshui Zhang, Fei Wang: Addressing Algorithmic Disparity and Performance
Inconsistency in Federated Learning. NeurIPS 2021, section 5.1. https://github.com/cuis15/FCFL
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.disparity import Disparities, Notion, reported_disparities
from fl_lightning.algorithms._shared.rows import require_finite
from fl_lightning.algorithms._shared.weighting import weighted_mean
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Needs, StepReport
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort


class FairReg(ServerRule):
    """One gradient step on ``sum_k l_k + lambda sum_k g_k``: losses and disparities added up over the clients.

    These are sums over clients, not means, and every client counts the same, as in the authors' code: with more clients
    the learning rate has to be smaller. The paper leaves the weights open.

    A client whose disparity is undefined counts with its loss alone, and in the log under ``without_group``.

    Args:
        weight: ``lambda``.
        notion: ``"dp"`` for demographic parity, ``"eo"`` for equal opportunity.
        sharpness: ``c`` of the surrogate ``sigmoid(c z)`` that stands in for the prediction ``1[z > 0]`` in training.
        num_groups: groups of people; ``g_k`` is the largest difference between two of them.

    Raises:
        ValueError: an argument is out of range.
    """

    layers = "model"
    needs = Needs(full_gradients=True)
    reads = "sums"

    @checked(weight=Bounds(0), sharpness=Bounds(above=0), num_groups=Bounds(2))
    def __init__(
        self, weight: float = 1.0, notion: Notion = "dp", sharpness: float = 10.0, num_groups: int = 2
    ) -> None:
        self.weight, self.notion, self.sharpness, self.num_groups = weight, notion, sharpness, num_groups
        self._client = Disparities("FairReg", notion, sharpness, num_groups)

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_k (u_k + lambda v_k)``, the rows of the losses and of the disparities."""
        disparities, companions = reported_disparities(cohort, "FairReg")
        known = ~disparities.isnan()
        ones = torch.ones(len(cohort), dtype=torch.float64)
        worst = float(disparities[known].max()) if bool(known.any()) else 0.0
        self.report = StepReport(weights=ones, scalars={"without_group": float((~known).sum()), "disparity": worst})
        step = companions.combine(self.weight * ones, out=weighted_mean(cohort, ones))
        if not bool(cohort.updates.norm_of(step).isfinite()):
            require_finite(companions.norms().isfinite(), cohort, "FairReg")
        return step
