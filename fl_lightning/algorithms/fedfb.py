# SPDX-License-Identifier: Apache-2.0
"""FedFB: Improving Fairness via Federated Learning (federated FairBatch), for demographic parity.

Yuchen Zeng, Hongxu Chen, Kangwook Lee. 2021. https://arxiv.org/abs/2110.15545
https://github.com/yzeng58/Improving-Fairness-via-Federated-Learning
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from fl_lightning.algorithms._shared.weighting import reported, require_parts, shares, stands_still, weighted_mean
from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.groups import GroupScores, group_scores
from fl_lightning.algorithms.records import ClientReport, Federation, LocalWork, Needs, StepReport
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.model_snapshot import standing_in
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.storage.per_client import per_client

COUNTS, LOSSES = "label_counts", "label_losses"  # [2, A] by label and group: samples, and sums of their losses


class FedFB(ServerRule):
    """Samples are reweighed, by label and group of people, until all groups are predicted 1 equally often.

    A sample with label ``y`` of group ``a`` weighs ``v[y, a] = lambda[y, a] / m[a]``, with the ``m[a]`` samples of the
    group at all clients. Clients descend ``sum v l / sum v`` of a batch, ``l`` being the binary cross entropy of a
    score, and count by the sum of their samples' ``v``. At first all samples weigh alike. Each round moves
    ``lambda[0, a]`` by ``alpha / sqrt(t + 1)`` times what a surrogate of the rate of predicted 1 in group ``a`` is
    above that of group 0, and ``lambda[0, 0]`` against the sum of these.

    docs/methods/fedfb.md says where this differs from the authors' code. The module's own loss is not used: ``l``
    follows from ``federated_groups``.

    Degenerate cases. Rates are those of a round's clients: a group that nobody of them has keeps its ``lambda``, and so
    do all groups in a round without group 0. If all samples of a round weigh 0, clients count alike, and the report is
    flagged. If all rows are zero, the step is zero and flagged.

    Args:
        alpha: how fast weights follow the rates; 0 is FedAvg on ``l``.
        num_groups: ``A``; ``federated_groups`` gives groups from 0 to ``A - 1``.

    Raises:
        ValueError: an argument is out of range.
    """

    reads = "sums"
    averages = True

    _client: FairBatches

    @checked(alpha=Bounds(0), num_groups=Bounds(2))
    def __init__(self, alpha: float = 0.3, num_groups: int = 2) -> None:
        self.alpha, self.num_groups = alpha, num_groups
        self._client = FairBatches(alpha, num_groups)

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns the mean of the updates, weighted by the sums of the clients' ``v``."""
        counts, losses = _tallies(cohort, self.num_groups)
        sums = (self._client.weights() * counts).sum((1, 2))
        weights = shares(sums)
        step = weighted_mean(cohort, weights)
        rates = positive_rates(counts, losses)
        known = rates[~rates.isnan()]
        gap = float(known.max() - known.min()) if len(known) else 0.0
        flagged = stands_still(cohort) or not bool(sums.any())
        self.report = StepReport(weights=weights, flagged=flagged, scalars={"surrogate_gap": gap})
        return step


class FairBatches(ClientRule):
    """Both halves of :class:`FedFB` besides averaging."""

    needs = Needs(groups=True)
    reads = "sums"

    # [A] float64: lambda[0, a] over lambda[0, a] + lambda[1, a] = 2 m[a] / m. So v[0, a] is proportional to this share.
    zero_share = server_state(torch.full((1,), 0.5, dtype=torch.float64), sent="all")  # [1] at first
    counts = server_state(torch.zeros((), dtype=torch.float64))  # [2, A] samples of all clients seen
    seen = per_client(bool)

    def __init__(self, alpha: float, num_groups: int) -> None:
        self.alpha, self.num_groups = alpha, num_groups
        self._tally = torch.zeros(2, 2, num_groups, dtype=torch.float64)

    def refusal(self, server: ServerRule) -> str | None:
        """Only FedFB weighs clients by what their samples weigh."""
        if isinstance(server, FedFB):
            return None
        return f"reweighs samples, and {type(server).__name__} does not weigh clients by them: leave client out"

    def begin_fit(self, federation: Federation) -> None:
        """Checks that restored weights belong to as many groups."""
        if len(self.zero_share) not in (1, self.num_groups):
            raise ValueError(
                f"num_groups of FedFB must be the checkpoint's {len(self.zero_share)}, found {self.num_groups}"
            )

    def weights(self) -> Tensor:
        """``[2, A]`` weights of samples by label and group, up to a factor: all 1 at first."""
        zero = 2 * self.zero_share
        return torch.stack([zero, 2 - zero]).expand(2, self.num_groups)

    def begin_client(self, work: LocalWork) -> None:
        """Passes over the client's data once, in evaluation mode."""
        if work.batches is None:
            raise ValueError("batches of the client's work must be given to sum up losses of groups")
        self._tally = torch.zeros(2, 2, self.num_groups, dtype=torch.float64)
        with torch.no_grad(), standing_in(work.module, work.parameters, work.layout, evaluate=True):
            for batch, _ in work.batches():
                with work.forward_context():
                    asked = group_scores(work.module, batch, self.num_groups)
                losses = _losses(asked).cpu().double()
                cells = one_hot((asked.positive * self.num_groups + asked.groups).cpu(), 2 * self.num_groups).double()
                self._tally += (torch.stack([torch.ones_like(losses), losses]) @ cells).view_as(self._tally)

    def shape_loss(self, work: LocalWork, loss: Tensor) -> Tensor:
        """0 times the module's own loss, which the reweighed one replaces."""
        return 0.0 * loss

    def loss_term(self, work: LocalWork, batch: Any, batch_idx: int) -> Tensor | None:
        """The reweighed loss of the batch; 0 where all of its samples weigh 0."""
        with standing_in(work.module, work.parameters, work.layout), work.forward_context():
            asked = group_scores(work.module, batch, self.num_groups)
        losses = _losses(asked)
        weights = self.weights().to(losses)[asked.positive.long(), asked.groups]
        total = weights.sum()
        return (weights * losses).sum() / (total + (total == 0))

    def end_client(self, work: LocalWork) -> ClientReport:
        """What was counted and summed up at the global parameters."""
        return ClientReport({COUNTS: self._tally[0], LOSSES: self._tally[1]})

    def commit(self, cohort: Cohort) -> None:
        """Moves the weights by the rates of the groups."""
        counts, losses = _tallies(cohort, self.num_groups)
        new = torch.tensor([client not in self.seen for client in cohort.client_ids])
        self.counts = self.counts + counts[new].sum(0)
        self.seen.update(dict.fromkeys(cohort.client_ids, True))
        rates = positive_rates(counts, losses)
        above = (rates - rates[0]).nan_to_num(0.0)  # f_a: 0 for group 0 itself, and where it is not known
        above[0] = -above.sum()
        whole = 2 * self.counts.sum(0) / self.counts.sum()  # [A] lambda[0, a] + lambda[1, a]
        moved = self.alpha / (cohort.round + 1) ** 0.5 * above
        self.zero_share = (self.zero_share + torch.where(whole > 0, moved / whole, 0.0)).clamp(0, 1)


def _losses(asked: GroupScores) -> Tensor:
    return binary_cross_entropy_with_logits(asked.scores, asked.positive.to(asked.scores), reduction="none")


def _tallies(cohort: Cohort, num_groups: int) -> tuple[Tensor, Tensor]:
    """``[m, 2, A]`` samples by label and group, and the sums of their losses."""
    counts = reported(cohort, COUNTS, (2, num_groups), "FedFB")
    losses = reported(cohort, LOSSES, (2, num_groups), "FedFB")
    require_parts(counts, cohort.sizes[:, None, None], cohort, COUNTS, "FedFB")
    require_parts(counts.sum((1, 2)), cohort.sizes, cohort, COUNTS, "FedFB")
    require_parts(losses, torch.inf, cohort, LOSSES, "FedFB")
    return counts, losses


def positive_rates(counts: Tensor, losses: Tensor) -> Tensor:
    """``[A]`` surrogates of the groups' rates of predicted 1 over all clients of a round; NaN without samples.

    A loss stands in for a wrong prediction: the rate is the share of label 1, less the losses of these samples, plus
    those of label 0.
    """
    size = counts.sum((0, 1))
    return ((counts[:, 1] - losses[:, 1] + losses[:, 0]).sum(0)) / size
