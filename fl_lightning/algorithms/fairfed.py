# SPDX-License-Identifier: Apache-2.0
"""FairFed: Enabling Group Fairness in Federated Learning.

Yahya H. Ezzeldin, Shen Yan, Chaoyang He, Emilio Ferrara, Salman Avestimehr. AAAI 2023.
https://arxiv.org/abs/2110.00857
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.disparity import PREDICTED, Notion, counted_groups
from fl_lightning.algorithms._shared.weighting import reported, require_parts, shares, stands_still, weighted_mean
from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.groups import group_scores
from fl_lightning.algorithms.records import ClientReport, LocalWork, Needs, StepReport
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.model_snapshot import standing_in
from fl_lightning.core.storage.per_client import per_client

HITS = "right_predictions"  # [2]: predicted right, and samples


class FairFed(ServerRule):
    """Clients whose disparity between two groups of people is far from that of all clients together count less.

    In each round a client's weight falls by ``beta`` times what its metric gap exceeds the round's mean gap by. The gap
    is that between its own disparity and the disparity over all clients of the round, at the model that they receive,
    on training data. A client that lacks one of the groups has no disparity: its gap is that of its accuracy. Weights
    begin at the clients' shares of the samples, and stay at 0 or above. Absent clients keep theirs.

    If all weights of a round's clients are 0, they count alike, and the report is flagged. If all rows are zero, the
    step is zero, flagged, and weights stay as they are.

    Args:
        beta: how fast weights follow the gaps; 0 is FedAvg.
        notion: ``"eo"`` for equal opportunity (rates among samples with label 1), ``"dp"`` for demographic parity.

    Raises:
        ValueError: ``beta`` is negative.
    """

    reads = "sums"
    averages = True

    weights = per_client(float)

    @checked(beta=Bounds(0))
    def __init__(self, beta: float = 1.0, notion: Notion = "eo") -> None:
        self.beta, self.notion = beta, notion
        self._client = GroupCounts(notion)

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_k w_k u_k / sum_k w_k``."""
        gaps = _gaps(cohort)
        whole = cohort.num_samples or float(cohort.sizes.sum())
        before = self.weights.vector(cohort.client_ids, cohort.sizes / whole)
        moved = (before - self.beta * (gaps - gaps.mean())).clamp_min(0)
        weights = shares(moved)
        step = weighted_mean(cohort, weights)
        still = stands_still(cohort)
        if not still:
            self.weights.put(cohort.client_ids, moved)
        self.report = StepReport(
            weights=weights, flagged=still or not bool(moved.any()), scalars={"metric_gap": float(gaps.max())}
        )
        return step


class GroupCounts(ClientRule):
    """Reports how many of each group the global model predicts 1, of how many, and how many it predicts right."""

    needs = Needs(groups=True)

    def __init__(self, notion: Notion) -> None:
        self.notion = notion
        self._counts: Mapping[str, Tensor] = {}

    def refusal(self, server: ServerRule) -> str | None:
        """Only FairFed reads the counts."""
        if isinstance(server, FairFed):
            return None
        return f"counts predictions for groups, which {type(server).__name__} does not read: leave client out"

    def begin_client(self, work: LocalWork) -> None:
        """Passes over the client's data once, in evaluation mode."""
        if work.batches is None:
            raise ValueError("batches of the client's work must be given to count predictions")
        predicted, hits = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        with torch.no_grad(), standing_in(work.module, work.parameters, work.layout, evaluate=True):
            for batch, _ in work.batches():
                with work.forward_context():
                    asked = group_scores(work.module, batch)
                positive = asked.scores > 0
                for group, chosen in enumerate(counted_groups(asked, self.notion)):
                    predicted[:, group] += torch.stack([(chosen & positive).sum(), chosen.sum()]).double().cpu()
                hits += torch.tensor([float((positive == asked.positive).sum()), len(positive)], dtype=torch.float64)
        self._counts = {PREDICTED: predicted, HITS: hits}

    def end_client(self, work: LocalWork) -> ClientReport:
        """What was counted at the global parameters."""
        return ClientReport(self._counts)


def _gaps(cohort: Cohort) -> Tensor:
    """``[m]`` distances of the clients' disparities, or accuracies, from those of all of them, on the CPU."""
    predicted = reported(cohort, PREDICTED, (2, 2), "FairFed")
    hits = reported(cohort, HITS, (2,), "FairFed")
    require_parts(hits, torch.stack([hits[:, 1], cohort.sizes], 1), cohort, HITS, "FairFed")
    others = predicted[:, 1].flip(1)  # of a client's samples, those in the other group
    wholes = torch.stack([predicted[:, 1], hits[:, 1:] - others], 1)
    require_parts(predicted, wholes, cohort, PREDICTED, "FairFed")
    own, common = _rate_gaps(predicted), _rate_gaps(predicted.sum(0, keepdim=True))
    right, all_right = hits[:, 0] / hits[:, 1].clamp_min(1), hits[:, 0].sum() / hits[:, 1].sum().clamp_min(1)
    gaps = (own - common).abs()
    return torch.where(gaps.isnan(), (right - all_right).abs(), gaps)


def _rate_gaps(predicted: Tensor) -> Tensor:
    """``[m]`` group 0's rate of being predicted 1 less group 1's, from ``[m, 2, 2]``; NaN where a group has nobody."""
    rates = predicted[:, 0] / predicted[:, 1]  # 0 / 0 is NaN
    return rates[:, 0] - rates[:, 1]
