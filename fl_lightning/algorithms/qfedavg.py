# SPDX-License-Identifier: Apache-2.0
"""q-FedAvg: Fair Resource Allocation in Federated Learning.

Tian Li, Maziar Sanjabi, Ahmad Beirami, Virginia Smith. ICLR 2020. https://arxiv.org/abs/1905.10497
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.weighting import nonnegative_losses, weighted_mean
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Needs, StepReport
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort

OFFSET = 1e-10  # keeps F^(q - 1) finite for q < 1 where a loss is 0 (authors' code)


class QFedAvg(ServerRule):
    """Descent on ``sum_i F_i^(q+1) / (q+1)``, with a step length from an estimated Lipschitz constant (Algorithm 2).

    ``L = 1 / eta`` is the Lipschitz constant at ``q = 0``. The rule has a unit of its own: the clients' learning rate
    decides how much of the updates' mean is taken, so their optimizer must be plain SGD.

    Degenerate cases. Losses enter as ``F + 1e-10``; with ``q < 1`` a loss of 0 makes the step very short. If all rows
    are zero, the step is zero and flagged.

    Args:
        q: how much large losses count, from 0 (the uniform mean of the updates) on.

    Raises:
        ValueError: ``q`` is negative or not finite.
    """

    needs = Needs(losses=True, client_lr=True)
    reads = "sums"

    @checked(q=Bounds(0))
    def __init__(self, q: float = 0.1) -> None:
        self.q = q

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_i Delta_i / sum_i h_i`` (Algorithm 2)."""
        losses = nonnegative_losses(cohort, "QFedAvg") + OFFSET
        if cohort.client_lr is None:
            raise ValueError("client_lr must be given: QFedAvg takes 1 / client_lr for the Lipschitz constant")
        norms = cohort.updates.norms().cpu()
        if not bool(norms.any()):
            self.report = StepReport(weights=torch.zeros_like(norms), flagged=True)
            return torch.zeros_like(cohort.params)
        if cohort.client_lr == 0:
            raise ValueError("client_lr must be positive for QFedAvg where clients moved, found 0")
        # With w - w_i = u_i = eta g_i, all divided by max F^q: Delta_i = F_i^q u_i / eta and
        # h_i = q F_i^(q - 1) ||u_i||^2 / eta^2 + F_i^q / eta. One eta cancels.
        power = (losses / losses.max()) ** self.q
        h = self.q * power / losses * norms.square() / cohort.client_lr + power
        weights = power / h.sum()
        step = weighted_mean(cohort, weights)
        self.report = StepReport(weights=weights)
        return step
