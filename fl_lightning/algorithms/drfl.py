# SPDX-License-Identifier: Apache-2.0
"""DRFL: A Dynamic Reweighting Strategy for Fair Federated Learning (experimental).

Zhiyuan Zhao, Gauri Joshi. ICASSP 2022. The paper was not at hand: the weights are those of the published FedLF
platform (https://github.com/zibinpan/FedLF).
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.algorithms._shared.weighting import nonnegative_losses, shares, weighted_mean
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Needs, StepReport
from fl_lightning.core.cohort import Cohort


class DRFL(ServerRule):
    """The mean of the updates, clients weighted in proportion to their loss (experimental).

    The paper's abstract also speaks of choosing clients; that part is not here, and its weights may differ from these.
    Where all losses are 0, all clients count alike.
    """

    needs = Needs(losses=True)
    reads = "sums"
    averages = True

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_i p_i u_i`` with ``p_i = F_i / sum_k F_k``."""
        losses = nonnegative_losses(cohort, "DRFL")
        weights = shares(losses)
        step = weighted_mean(cohort, weights)
        self.report = StepReport(weights=weights, flagged=not bool(losses.any()))
        return step
