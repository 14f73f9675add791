# SPDX-License-Identifier: Apache-2.0
"""FedMDFG: Federated Learning with Multi-Gradient Descent and Fair Guidance.

Zibin Pan, Shuyi Wang, Chi Li, Haijin Wang, Xiaoying Tang, Junhua Zhao. AAAI 2023.
https://github.com/zibinpan/FedMDFG
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.rows import (
    SHORT_DIRECTION,
    RemembersRows,
    common_descent,
    fair_weights,
    live_rows,
    loss_angle,
    no_step,
)
from fl_lightning.algorithms.records import Federation, Needs, Reading, StepReport
from fl_lightning.arguments import DEVICE, Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.per_client import per_client
from fl_lightning.ops.rows import row_norms


class FedMDFG(RemembersRows):
    """A common descent direction that also makes losses more equal, and a line search along it (Algorithms 1 and 2).

    Rows are the learning rate times a gradient, so a step length ``a`` of the paper is ``a / eta`` here.

    Clients whose row is zero, or 1e-8 times shorter than the median, are dropped for the round. With linearly dependent
    rows the fair row can make the direction zero although all clients agree on one, against the paper's Theorem 1. So a
    zero direction is tried again without the fair row, then without remembered rows, and the report is flagged; what
    counts as zero, and which directions are flagged as too short, :class:`FedLF` says. If nothing helps, if all rows or
    the learning rate are zero, or if no trial of the line search has finite losses, the step is zero, flagged, and
    nothing is remembered.

    Args:
        theta: angle in radians between losses and ``(1, ..., 1)`` up to which the model counts as fair.
        s: the line search tries lengths from ``2^s`` down to ``2^-s`` learning rates.
        beta: parameter of the Armijo condition; 0 only asks that no loss rises.
        reading: whose form four steps take, as docs/methods/fedmdfg.md lists; ``"library"`` follows the paper but keeps
            clients whose loss is 0.
        gradient_source: ``"full"`` for full gradients (the paper), ``"update"`` for local training.
        history_device: where remembered rows live, for instance ``"cpu"``; ``None``: beside the updates.

    Raises:
        ValueError: an argument is out of range.
    """

    reference = per_client(float)  # R_i

    @checked(theta=Bounds(above=0, most=math.pi / 2), s=Bounds(0), beta=Bounds(0, below=1), history_device=DEVICE)
    def __init__(
        self,
        theta: float = math.pi / 16,
        s: int = 5,
        beta: float = 1e-4,
        reading: Reading = "library",
        gradient_source: Literal["full", "update"] = "full",
        history_device: str | None = None,
    ) -> None:
        super().__init__(1, None, history_device)
        full = gradient_source == "full"
        self.needs = Needs(losses=True, requery=True, client_lr=True, full_gradients=full)
        self.theta, self.s, self.beta = theta, s, beta
        self.reading, self.gradient_source = reading, gradient_source
        self._drops_zero_losses = reading == "paper"
        # The code's sign of the Armijo condition, its angle test that always holds, and fair rows only where some gain.
        self._losses_may_rise = self._skips_angle_test = self._some_must_gain = reading == "code"

    def aggregate(self, cohort: Cohort) -> Tensor:
        """See the class."""
        m, losses, eta, losses_at = len(cohort), cohort.known_losses, cohort.client_lr, cohort.losses_at
        if eta is None or losses_at is None:
            raise ValueError("client_lr and losses_at must be given: FedMDFG searches along its direction for the step")
        rows = self.joint_rows(cohort)  # line 4, and line 18: S_old \ S_t
        gram = rows.on_cpu(rows.gram.sum(0))  # K [m + h, m + h]
        norms, h = row_norms(gram)[:m], len(rows.absent)
        live = live_rows(norms, m)  # line 5
        if self._drops_zero_losses:
            live &= losses != 0
        if eta == 0 or not bool(live.any()):
            return no_step(self, cohort)

        rescale = torch.where(live, norms[live].mean() / norms, 0.0)  # line 6
        scale = torch.cat([rescale, torch.full((h,), eta, dtype=torch.float64)])
        found = self._direction(cohort, gram, scale, self._fair(cohort, losses, live))  # lines 11 to 19
        if found is None:
            return no_step(self, cohort)  # line 20
        c, fair, flagged = found
        mean = torch.cat([rescale / live.sum(), torch.zeros(h, dtype=torch.float64)])
        sigma = float(((mean @ gram @ mean).clamp_min(0) / (c @ gram @ c)).sqrt())
        c *= sigma  # line 21: d <- sigma d, as long as the mean of the rescaled rows
        direction = rows.combine(c)
        slopes = (gram @ c)[:m] * rescale / eta  # g_i . d per learning rate, in units of the loss

        def losses_after(length: float) -> Tensor:
            return _checked(losses_at(torch.sub(cohort.params, direction, alpha=length)), m)[live]

        demand = (-self.beta if self._losses_may_rise else self.beta) * slopes[live]
        highest, lowest = 1.0 if h else 2.0**self.s, 2.0**-self.s / sigma  # eta_ub, eta_lb (Algorithm 2, lines 1 and 2)
        search = line_search(
            losses_after, losses[live], demand, fair and not self._skips_angle_test, highest, lowest
        )  # line 24
        if search is None:
            return no_step(self, cohort)
        length, evaluations = search

        self._update_reference(cohort, losses, live)  # line 26
        self.remember(cohort, rescale / eta, live)  # line 27, as gradients
        self.report = StepReport(
            weights=length * c[:m],
            flagged=flagged or 1 / sigma < SHORT_DIRECTION,
            scalars={
                "direction_ratio": 1 / sigma,
                "step_length": length,
                "evaluations": float(evaluations),
                "fair_row": float(fair),
                "history_rows": float(h),
            },
        )
        return direction.mul_(length)  # line 25

    def _fair(self, cohort: Cohort, losses: Tensor, live: Tensor) -> Tensor | None:
        """Weights ``h`` ``[m]`` of the fair row, if the model is not fair enough or a client is worse than it was."""
        known = [self.reference.get(i, math.inf) for i in cohort.client_ids]
        exceeds = losses[live] > torch.tensor(known, dtype=torch.float64)[live]
        forced = bool(exceeds.any()) and (not self._some_must_gain or not bool(exceeds.all()))
        if loss_angle(losses[live]) <= self.theta and not forced:
            return None
        weights = fair_weights(losses[live])
        return None if weights is None else torch.zeros_like(losses).masked_scatter(live, weights)

    def _direction(
        self, cohort: Cohort, gram: Tensor, scale: Tensor, h: Tensor | None
    ) -> tuple[Tensor, bool, bool] | None:
        """Coefficients of the direction, whether the fair row took part, and whether a fallback was needed."""
        m = len(cohort)
        online = torch.where(torch.arange(len(scale)) < m, scale, 0.0)
        attempts = dict.fromkeys((fair, rows) for rows in (True, False) for fair in (h is not None, False))
        for number, (fair, remembered) in enumerate(attempts):
            rows = scale if remembered else online
            found = common_descent(gram[None], cohort, h if fair else None, rows[None])  # with Q h
            if bool(found.solved):
                return found.coeff[0], fair, number > 0
        return None

    def _update_reference(self, cohort: Cohort, losses: Tensor, live: Tensor) -> None:
        """Lets the reference loss ``R_i`` follow a falling loss slowly (section 3.2)."""
        t = cohort.round
        for client, loss, alive in zip(cohort.client_ids, losses.tolist(), live.tolist(), strict=True):
            reference = self.reference.get(client, loss)
            if alive:
                self.reference[client] = (t * reference + loss) / (t + 1) if loss < reference else reference

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the remembered rows, and of the parameters that the line search tries."""
        line_search = federation.layout.numel * federation.dtype.itemsize
        return {**super().memory(federation, cohort_size), "line_search": line_search}


def _checked(found: Tensor, m: int) -> Tensor:
    losses = torch.as_tensor(found).to("cpu", torch.float64)
    if losses.shape != (m,):
        raise ValueError(f"losses_at must return {m} losses for FedMDFG, found shape {tuple(losses.shape)}")
    return losses


_ROUNDING = 1e-6  # relative error of the shortest length to try, which comes from inner products; lengths are halved


def line_search(
    losses_after: Callable[[float], Tensor], before: Tensor, demand: Tensor, fairer: bool, highest: float, lowest: float
) -> tuple[float, int] | None:
    """The first of ``highest``, ``highest / 2``, ... after which every loss has fallen as demanded, and the trials.

    If there is none down to ``lowest``: the longest that lowers the sum of the losses, else the one with the least sum;
    ``None`` if no trial had finite losses. ``losses_after`` gives losses ``[m]`` after a step of a given length, and
    ``demand [m]`` the least fall of the losses per unit of length; negative numbers let them rise. ``fairer``: the
    angle between the losses and ``(1, ..., 1)`` must shrink, too.
    """
    length, trials, angle = highest, list[tuple[float, float]](), loss_angle(before)  # H
    while length >= lowest * (1 - _ROUNDING):  # line 4
        after = losses_after(length)  # lines 5 and 6
        trials.append((length, float(after.sum())))  # line 7
        enough = bool((before - after >= length * demand).all())  # line 8
        if enough and (not fairer or loss_angle(after) < angle):  # line 9
            return length, len(trials)
        length /= 2  # line 14
    finite = [trial for trial in trials if math.isfinite(trial[1])]
    lower = [trial for trial in finite if trial[1] < float(before.sum())]
    if not finite:
        return None
    chosen = lower[0] if lower else min(finite, key=lambda trial: trial[1])  # lines 16 to 21
    return chosen[0], len(trials)
