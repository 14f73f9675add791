# SPDX-License-Identifier: Apache-2.0
"""FedFa: Fairness and Accuracy in (Horizontal) Federated Learning.

Wei Huang, Tianrui Li, Dexian Wang, Shengdong Du, Junbo Zhang, Tianqiang Huang. Information Sciences 589, 2022.
https://arxiv.org/abs/2012.10069
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.weighting import (
    information,
    reported,
    require_parts,
    shares,
    stands_still,
    weighted_mean,
)
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Needs, StepReport
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.storage.per_client import per_client


class FedFa(ServerRule):
    """Weighs clients by what their accuracy and their participation tell, and adds momentum on the server.

    A client's weight is ``(1 - beta) I_i + beta J_i``. ``I`` is the information of its share of the cohort's accuracy,
    large for clients that the model serves badly; ``J`` that of its share of the cohort's participations, this round
    included, large for clients that take part often. The accuracy is the global model's on the client's training data,
    before local training. The paper's clients use momentum too: give their SGD ``momentum=0.9``.

    If no client predicts anything right, all have the same accuracy information. A client alone has weight 1. If all
    rows are zero, the step is zero, flagged, and neither momentum nor counts change.

    Args:
        beta: weight of the participation against the accuracy, between 0 and 1.
        gamma: server momentum, from 0 to below 1.

    Raises:
        ValueError: an argument is out of range.
    """

    needs = Needs(accuracies=True)
    reads = "sums"

    counts = per_client(int)  # f_i
    momentum = server_state(Tensor, wide=True)  # v

    @checked(beta=Bounds(0, 1), gamma=Bounds(0, below=1))
    def __init__(self, beta: float = 0.5, gamma: float = 0.9) -> None:
        self.beta, self.gamma = beta, gamma

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns the momentum ``v <- gamma v + sum_i p_i u_i``."""
        accuracies = reported(cohort, "accuracy", (), "FedFa")
        require_parts(accuracies, 1, cohort, "accuracy", "FedFa")
        counts = {client: self.counts.get(client, 0) + 1 for client in cohort.client_ids}
        frequency = shares(torch.tensor(list(counts.values()), dtype=torch.float64))
        accuracy = information(shares(accuracies))
        weights = (1 - self.beta) * accuracy + self.beta * information(1 - frequency)
        step = weighted_mean(cohort, weights)
        if stands_still(cohort):
            self.report = StepReport(weights=weights, flagged=True)
            return step
        update = step.to(torch.promote_types(step.dtype, torch.float32))
        momentum = torch.zeros_like(update) if self.momentum is None else self.momentum.to(update)
        self.momentum = momentum = self.gamma * momentum + update
        self.counts.update(counts)
        self.report = StepReport(weights=weights, flagged=not bool(accuracies.any()))
        return momentum.to(step.dtype, copy=True)
