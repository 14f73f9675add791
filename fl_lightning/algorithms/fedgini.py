# SPDX-License-Identifier: Apache-2.0
"""FedGini: Heterogeneity-Aware Fair Federated Learning (experimental).

Xiaoli Li, Siran Zhao, Chuan Chen, Zibin Zheng. Information Sciences 619, 2023. The paper was not at hand: the weights
are those of the published FedLF platform (https://github.com/zibinpan/FedLF), with its ranking put right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.weighting import weighted_mean
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Needs, StepReport
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort


class FedGini(ServerRule):
    """The mean of the updates, clients weighted by the rank of their loss, the largest most (experimental).

    The weight of the client with the ``k``-th smallest loss, ``k`` from 0, is proportional to
    ``1 + 3 (1 - epsilon) k (k + 1) / ((m - 1) m (m + 1))``. The largest is ``1 + 3 (1 - epsilon) / (m + 1)`` times the
    smallest. Clients with equal losses share the mean of their ranks' weights. A client alone has weight 1.

    Args:
        epsilon: from 0 (widest spread) to 1 (all clients alike).

    Raises:
        ValueError: ``epsilon`` is not between 0 and 1.
    """

    needs = Needs(losses=True)
    reads = "sums"
    averages = True

    @checked(epsilon=Bounds(0, 1))
    def __init__(self, epsilon: float = 0.5) -> None:
        self.epsilon = epsilon

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_i p_i u_i``."""
        losses, m = cohort.known_losses, len(cohort)
        k = torch.arange(m, dtype=torch.float64)
        by_rank = 1 + 3 * (1 - self.epsilon) * k * (k + 1) / max(1, (m - 1) * m * (m + 1))
        _, place, count = torch.unique(losses, return_inverse=True, return_counts=True)
        ends = count.cumsum(0)
        totals = torch.cat([torch.zeros(1, dtype=torch.float64), by_rank.cumsum(0)])
        weights = ((totals[ends] - totals[ends - count]) / count)[place] / totals[-1]
        step = weighted_mean(cohort, weights)
        self.report = StepReport(weights=weights)
        return step
