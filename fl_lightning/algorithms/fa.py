# SPDX-License-Identifier: Apache-2.0
"""FA: Fairness-aware Agnostic Federated Learning (AgnosticFair; experimental).

Wei Du, Depeng Xu, Xintao Wu, Hanghang Tong. SDM 2021. https://arxiv.org/abs/2010.05057
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fl_lightning.algorithms._shared.weighting import reported, require_parts
from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.groups import group_scores
from fl_lightning.algorithms.records import ClientReport, Federation, LocalWork, Needs
from fl_lightning.arguments import FILLED, Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.model_snapshot import standing_in
from fl_lightning.core.storage.declared import server_state
from fl_lightning.ops.solvers import linear_program

NO_KERNEL = 1e-12  # a basis that reaches less than this share of what the best one does has no samples


def first_of_batch(batch: Any) -> Tensor:
    """The inputs of a batch whose first part they are, ``[B, d]``."""
    inputs: Tensor = batch[0]
    return inputs.flatten(1)


class FA(FedAvg):
    """FedAvg on the losses of the worst reweighing of the samples, with a bound on the covariance of group and score.

    A sample ``x`` weighs ``theta(x) = sum_j a_j k(x, b_j)``, with Gaussian kernels around bases ``b_j`` that all
    clients share. Clients train on ``mean of theta(x) l + penalty * max(0, |C| - tau)``, where ``l`` is the binary
    cross entropy of a score and ``C`` the mean of ``theta(x) (A - mean A) score``. They report sums per basis, and from
    these the server finds the ``a`` that makes the mean loss largest, a linear program: ``a >= 0``, ``theta`` has mean
    1 and is at most ``bound`` at every basis, ``|C| <= tau``. In the first round ``theta`` is 1.

    Experimental: docs/methods/fa.md says what was decided here, where no code by its authors is public; no argument has
    a published value. The module's own loss is not used: ``l`` follows from ``federated_groups``.

    A basis without samples near it gets weight 0. If no ``a`` meets all constraints, ``|C| <= tau`` is left out for the
    round; if that does not help, ``a`` stays as it is, and rounds are flagged.

    Args:
        bases: ``[J, d]`` the ``b_j``.
        sigma: width of the kernels; ``None``: the median distance between bases, or 1 for a single one.
        bound: largest weight of a sample, at least 1.
        tau: largest covariance.
        penalty: weight of the part of the covariance above ``tau``.
        inputs: ``x`` ``[B, d]`` of a batch; default its first part, flattened.
        weighting: how the server weighs clients, see :class:`FedAvg`.

    Raises:
        ValueError: an argument is out of range.
    """

    reads = "sums"

    known_weights = FedAvg.known_weights

    _client: AgnosticWeights

    @checked(bases=FILLED, sigma=Bounds(above=0), bound=Bounds(1), tau=Bounds(0), penalty=Bounds(0))
    def __init__(
        self,
        bases: Tensor | Sequence[Sequence[float]],
        sigma: float | None = None,
        bound: float = 10.0,
        tau: float = 0.05,
        penalty: float = 1.0,
        inputs: Callable[[Any], Tensor] = first_of_batch,
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        super().__init__(weighting)
        self.bases, self.inputs = torch.as_tensor(bases).double(), inputs
        self.sigma, self.bound, self.tau, self.penalty = sigma, bound, tau, penalty
        self._client = AgnosticWeights(self.bases, sigma, bound, tau, penalty, inputs)

    def aggregate(self, cohort: Cohort) -> Tensor:
        """As :class:`FedAvg`; flagged if the clients trained under weights that no search of the last round found."""
        step = super().aggregate(cohort)
        self.report = replace(self.report, flagged=self._client.stuck)
        return step


class AgnosticWeights(ClientRule):
    """Both halves of :class:`FA` besides averaging."""

    needs = Needs(groups=True)
    reads = "sums"

    a = server_state(torch.zeros(0, dtype=torch.float64), sent="all")  # [J] float64 coefficients of the kernels
    share = server_state(float, sent="all")  # of group 1 among all samples
    relaxed = server_state(0)  # rounds in which no a met all constraints
    stuck = server_state(False)  # the last search found no a at all

    def __init__(
        self,
        bases: Tensor,
        sigma: float | None,
        bound: float,
        tau: float,
        penalty: float,
        inputs: Callable[[Any], Tensor],
    ) -> None:
        if bases.dim() != 2 or bases.numel() == 0 or not bool(bases.isfinite().all()):
            raise ValueError(f"bases of FA must be finite and have shape [J, d], found {list(bases.shape)}")
        self.bases, self.sigma, self.bound, self.tau, self.penalty = bases.double(), sigma, bound, tau, penalty
        self._width = _usual_distance(self.bases) if sigma is None else sigma
        self.inputs = inputs

    def begin_client(self, work: LocalWork) -> None:
        """Nothing has been summed up yet."""
        self._sums = torch.zeros(4, len(self.bases), dtype=torch.float64)  # of k, k l, k score and k A score
        self._counts = torch.zeros(2, dtype=torch.float64)  # samples, and those in group 1

    def shape_loss(self, work: LocalWork, loss: Tensor) -> Tensor:
        """0 times the module's own loss, which the reweighed one replaces."""
        return 0.0 * loss

    def loss_term(self, work: LocalWork, batch: Any, batch_idx: int) -> Tensor | None:
        """The reweighed loss of the batch with its penalty."""
        with standing_in(work.module, work.parameters, work.layout), work.forward_context():
            asked = group_scores(work.module, batch)
        scores, member = asked.scores, asked.member.to(asked.scores)
        losses = binary_cross_entropy_with_logits(scores, asked.positive.to(scores), reduction="none")
        kernels = self._kernels(self.inputs(batch))  # [B, J]
        rows = torch.stack([torch.ones_like(scores), losses, scores, member * scores]).detach().cpu().double()
        self._sums += rows @ kernels.cpu()
        self._counts += torch.tensor([len(scores), float(member.sum())], dtype=torch.float64)

        theta = (kernels @ self.a.to(kernels)).to(scores) if len(self.a) else torch.ones_like(scores)
        share = member.mean() if self.share is None else self.share
        covariance = (theta * (member - share) * scores).mean()
        return (theta * losses).mean() + self.penalty * torch.relu(covariance.abs() - self.tau)

    def _kernels(self, inputs: Tensor) -> Tensor:
        """``k(x_i, b_j)``, ``[B, J]`` (float32 where there is no float64)."""
        bases = self.bases.to(inputs.device, torch.float32 if inputs.device.type == "mps" else torch.float64)
        if inputs.dim() != 2 or inputs.shape[1] != bases.shape[1]:
            raise ValueError(
                f"inputs of FA must have shape [B, {bases.shape[1]}] as its bases do, found {list(inputs.shape)}"
            )
        # By differences: products of many inputs far from 0 would not know how far they are from each other.
        distances = torch.cdist(inputs.detach().to(bases), bases, compute_mode="donot_use_mm_for_euclid_dist")
        return torch.exp(-distances.square() / (2 * self._width**2))

    def end_client(self, work: LocalWork) -> ClientReport:
        """Reports the sums per basis and the counts."""
        return ClientReport(extras={"kernel_sums": self._sums, "group_counts": self._counts})

    def commit(self, cohort: Cohort) -> None:
        """Finds the worst weights for the next round."""
        counts = reported(cohort, "group_counts", (2,), "FA")
        sums = reported(cohort, "kernel_sums", (4, None), "FA")
        require_parts(counts, counts[:, :1], cohort, "group_counts", "FA")
        require_parts(sums[:, 0], counts[:, :1], cohort, "kernel_sums", "FA")  # no kernel is more than 1
        total, members = counts.sum(0).tolist()
        mass, losses, scores, member_scores = sums.sum(0) / total
        self.share = share = members / total
        near = mass > NO_KERNEL * mass.max()
        covariances = (member_scores - share * scores)[None]
        among = self._kernels(self.bases)
        ceilings = torch.full((len(among),), self.bound, dtype=torch.float64)
        limits = torch.full((2,), self.tau, dtype=torch.float64)
        for rows, sides in (
            (torch.cat([covariances, -covariances, among]), torch.cat([limits, ceilings])),
            (among, ceilings),
        ):
            found = linear_program(losses[near], rows[:, near], sides, mass[near])
            if found.status == "optimal":
                self.a = torch.zeros_like(mass).masked_scatter(near, found.x)
                self.relaxed += len(rows) == len(among)
                self.stuck = False
                return
        self.relaxed += 1
        if not self.stuck:
            warnings.warn(
                f"FA found no weights in round {cohort.round}: kernels of width sigma={self._width:g} around bases "
                f"that lie {_usual_distance(self.bases):g} apart cannot give all samples a mean weight of 1 and none "
                f"more than bound={self.bound:g}. Samples keep the weights they had; raise sigma or bound",
                stacklevel=2,
            )
        self.stuck = True

    def begin_fit(self, federation: Federation) -> None:
        """Checks that a restored ``a`` belongs to these bases."""
        if len(self.a) not in (0, len(self.bases)):
            raise ValueError(f"bases of FA must be the {len(self.a)} of the checkpoint, found {len(self.bases)}")


def _usual_distance(bases: Tensor) -> float:
    """The median distance between bases that differ, the width at which kernels reach their neighbours; else 1."""
    distances = torch.pdist(bases)
    distances = distances[distances > 0]
    return float(distances.median()) if len(distances) else 1.0
