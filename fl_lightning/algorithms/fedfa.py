# SPDX-License-Identifier: Apache-2.0
"""FedFa: Fairness and Accuracy in (Horizontal) Federated Learning.

Wei Huang, Tianrui Li, Dexian Wang, Shengdong Du, Junbo Zhang, Tianqiang Huang. Information Sciences 589, 2022.
https://arxiv.org/abs/2012.10069
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.weighting import information, reported, shares, stands_still, weighted_mean
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Federation, Needs, State, StepReport
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort


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
    column_state = ("momentum",)

    @checked(beta=Bounds(0, 1), gamma=Bounds(0, below=1))
    def __init__(self, beta: float = 0.5, gamma: float = 0.9) -> None:
        self.beta, self.gamma = beta, gamma
        self._counts: dict[int, int] = {}  # f_i
        self._momentum: Tensor | None = None

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns the momentum ``v <- gamma v + sum_i p_i u_i``.

        Raises:
            ValueError: accuracies are missing, negative or not finite, or a row is not finite.
        """
        accuracies = reported(cohort, "accuracy", (), "FedFa", least=0)
        counts = {client: self._counts.get(client, 0) + 1 for client in cohort.client_ids}
        frequency = shares(torch.tensor(list(counts.values()), dtype=torch.float64))
        accuracy = information(shares(accuracies))
        weights = (1 - self.beta) * accuracy + self.beta * information(1 - frequency)
        step = weighted_mean(cohort, weights)
        if stands_still(cohort):
            self.report = StepReport(weights=weights, flagged=True)
            return step
        update = step.to(torch.promote_types(step.dtype, torch.float32))
        momentum = torch.zeros_like(update) if self._momentum is None else self._momentum.to(update)
        self._momentum = self.gamma * momentum + update
        self._counts |= counts
        self.report = StepReport(weights=weights, flagged=not bool(accuracies.any()))
        return self._momentum.to(step.dtype, copy=True)

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the momentum."""
        width = torch.promote_types(federation.dtype, torch.float32).itemsize
        return {"server momentum": federation.numel * width}

    def reset(self) -> None:
        """Forgets participations and momentum."""
        self._counts, self._momentum = {}, None
        self.report = StepReport()

    def state_dict(self) -> State:
        """Participations by client id, and the momentum."""
        state: State = {"counts": dict(self._counts)}
        return state if self._momentum is None else state | {"momentum": self._momentum}

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._counts = {int(client): int(count) for client, count in state["counts"].items()}
        self._momentum = state["momentum"].clone() if "momentum" in state else None
