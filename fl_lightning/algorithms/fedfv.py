# SPDX-License-Identifier: Apache-2.0
"""FedFV: Federated Learning with Fair Averaging.

Zheng Wang, Xiaoliang Fan, Jianzhong Qi, Chenglu Wen, Cheng Wang, Rongshan Yu. IJCAI 2021.
https://github.com/WwZzz/easyFL
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.algorithms._shared.rows import (
    ZERO_DIRECTION,
    ZERO_ROW,
    RemembersRows,
    length,
    live_rows,
    no_step,
    rounding_error,
)
from fl_lightning.algorithms.records import Needs, Reading, StepReport
from fl_lightning.arguments import DEVICE, Bounds, check_unused, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.seeding import derive_seed
from fl_lightning.ops.rows import row_norms

ProjectingOrder: TypeAlias = Literal["loss", "random", "reversed"]
"""In which order updates are projected off those of others: the largest loss last, as drawn, the smallest loss last."""


class FedFV(RemembersRows):
    """The mean of updates that were first projected off the updates they conflict with (Algorithm 1).

    Internal conflicts (Algorithm 2): each update is projected off the others that it conflicts with, one after the
    other, those of the largest losses last. Clients with the largest losses keep their updates as they are. External
    conflicts (section 3.3): the mean is projected off the last updates of clients that were online in the ``tau``
    rounds before and are absent now, summed per round, from the oldest round to the newest. The result is as long as
    the mean of the updates as they came.

    The step may still conflict with a client, also with the one projected on last.

    Degenerate cases. No update is projected off a row that is 1e-8 times shorter than the median online one. A mean
    that is 1e-4 times shorter than the rows counts as zero: it is not rescaled, the step is zero and flagged. If all
    rows are zero, the step is zero too, flagged, and nothing is remembered. Of clients with equal losses the one that
    reported first is projected on first.

    Args:
        alpha: share of the clients that keep their updates, in [0, 1].
        tau: rounds that an absent client counts for; 0 ignores absent clients.
        reading: how many of ``m`` clients keep their updates, ``m - ceil((m - 1) (1 - alpha))`` or for ``"paper"``
            ``alpha m`` rounded, and which rounds ``tau`` covers, ``t - tau`` to ``t - 1`` or for ``"code"``
            ``t - tau + 1`` to ``t``.
        max_history: most rows to remember, oldest dropped first; ``None``: all within ``tau`` rounds, if they are one
            round's or take no more than 8 GiB.
        history_device: where remembered rows live, for instance ``"cpu"``; ``None``: beside the updates.
        order: of projecting inside the round: ``"loss"``, or for comparison (the paper's Table 4) ``"random"``, drawn
            anew in every round, or ``"reversed"``. Who keeps the update is decided by the losses all the same.
        seed: of the orders that are drawn.

    Raises:
        ValueError: an argument is out of range.
    """

    needs = Needs(losses=True)

    _eps = 0.0  # added to the squared norms and to the norm that are divided by, as some published code does

    @checked(alpha=Bounds(0, 1), tau=Bounds(0), max_history=Bounds(1), history_device=DEVICE)
    def __init__(
        self,
        alpha: float = 0.1,
        tau: int = 1,
        reading: Reading = "library",
        max_history: int | None = None,
        history_device: str | None = None,
        order: ProjectingOrder = "loss",
        seed: int = 0,
    ) -> None:
        super().__init__(tau, max_history, history_device)
        if order != "random":
            check_unused("seed of FedFV", seed, 0, f"where order={order!r}")
        self.alpha, self.tau, self.reading, self.order, self.seed = alpha, tau, reading, order, seed
        self._rounds_share, self._counts_own_round = reading == "paper", reading == "code"

    def aggregate(self, cohort: Cohort) -> Tensor:
        """See the class."""
        m, t, losses = len(cohort), cohort.round, cohort.known_losses  # line 4
        outside = 0 < self.tau <= t  # line 7
        rows = self.joint_rows(cohort, t - self.tau + self._counts_own_round if outside else math.inf)
        gram = rows.on_cpu(rows.gram.sum(0))  # K [m + h, m + h]
        norms = row_norms(gram)
        if not bool(norms[:m].any()):
            return no_step(self, cohort)
        live = live_rows(norms, m)
        gram *= torch.outer(live, live)

        c = torch.zeros(len(gram), dtype=torch.float64)
        c[:m] = self._internal(gram[:m, :m], losses, t)  # lines 5 and 6
        own = t if self._counts_own_round else -1
        rounds = torch.tensor([own] * m + self.history.rounds(rows.absent))
        found = self._external(gram, c, rounds, rounding_error(cohort)) if outside else 0  # line 8
        size = length(c, gram)  # ||g^t||
        moves = size > ZERO_DIRECTION * gram.diagonal()[:m].mean().sqrt()
        target = gram[:m, :m].mean().clamp_min(0).sqrt()  # ||1/m sum_k g_k^t||, rows as they came
        c *= target / (size + self._eps) if moves else 0.0  # line 10
        step = rows.combine(c)  # line 11

        self.remember(cohort)
        scalars = {"history_rows": float(len(rows.absent)), "external_conflicts": float(found)}
        self.report = StepReport(weights=c[:m].clone(), flagged=not bool(moves), scalars=scalars)
        return step

    def _internal(self, gram: Tensor, losses: Tensor, t: int) -> Tensor:
        """Coefficients ``[m]`` of the mean of the projected rows (Algorithm 2)."""
        m = len(losses)
        order = losses.argsort(stable=True)  # PO^t: the largest loss is projected on last
        keep = torch.zeros(m, dtype=torch.bool)
        keep[order[m - self._kept(m) :]] = True
        if self.order == "reversed":
            order = losses.argsort(stable=True, descending=True)
        elif self.order == "random":
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "projecting order", t))
            order = order[torch.randperm(m, generator=generator)]
        # Only squared norms that are divided by come from the diagonal.
        divided = gram + self._eps * torch.eye(m, dtype=torch.float64)
        return ops.project_conflicts(divided[None], order, keep)[0].mean(0)

    def _kept(self, m: int) -> int:
        """How many of ``m`` clients keep their updates, in floating point as published: 3 of 10 for a third."""
        if self._rounds_share:
            return math.floor(self.alpha * m + 0.5)
        return m - math.ceil((m - 1) * (1 - self.alpha)) if self.alpha > 0 else 0

    def _external(self, gram: Tensor, c: Tensor, rounds: Tensor, rounding: float) -> int:
        """Projects ``c [k]`` in place off the rows that it conflicts with, round by round (Algorithm 3).

        ``rounds [k]`` are those of the rows, of which -1 leaves one out. ``rounding`` is the relative error of
        products: what it can make negative is no conflict. Returns how many rows conflicted.
        """
        found, norms = 0, row_norms(gram)
        for k in sorted({k for k in rounds.tolist() if k >= 0}):
            slopes = gram @ c
            noise = rounding * norms * (c.abs() @ norms)
            conflicting = ((rounds == k) & (slopes < -noise)).double()
            size = conflicting @ gram @ conflicting
            if size > (ZERO_ROW * (conflicting * norms).max()) ** 2:  # they do not cancel
                c -= (conflicting @ slopes) / (size + self._eps) * conflicting
                found += int(conflicting.sum())
        return found
