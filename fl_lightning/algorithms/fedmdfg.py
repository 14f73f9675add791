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

from fl_lightning.algorithms._shared.common_descent import (
    ZERO_ROW,
    check_rows,
    common_descent,
    fair_weights,
    loss_angle,
    rounding_error,
    row_norms,
)
from fl_lightning.algorithms.base import Federation, Needs, ServerRule, State, StepReport
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.row_history import RowHistory


class FedMDFG(ServerRule):
    """A common descent direction that also makes losses more equal, and a line search along it (Algorithms 1 and 2).

    Rows are the learning rate times a gradient, so a step length ``a`` of the paper is ``a / eta`` here.

    Degenerate cases. Clients whose row is zero are dropped for the round. The fair row is left out for one client and
    for equal losses. With linearly dependent rows it can make the direction zero although all clients agree on one,
    against the paper's Theorem 1. So a zero direction (1e-4 times shorter than the rows, or with a slope that rounding
    could turn around) is tried again without the fair row, then without remembered rows, and the report is flagged. If
    nothing helps, if all rows or the learning rate are zero, or if no trial of the line search has finite losses, the
    step is zero, flagged, and nothing is remembered.

    Args:
        theta: angle in radians between losses and ``(1, ..., 1)`` up to which the model counts as fair.
        s: the line search tries lengths from ``2^s`` down to ``2^-s`` learning rates.
        beta: parameter of the Armijo condition.
        armijo_sign: ``"paper"`` asks every loss to fall by ``beta`` times the slope, ``"reference"`` lets it rise by as
            much (the authors' code).
        angle_test: ``"paper"`` asks the angle of the losses to shrink while the fair row is active, ``"none"`` does not
            (what the authors' code amounts to).
        drop_zero_loss: also drop clients whose loss is 0 (Algorithm 1, line 5; the authors' code keeps them).
        force_when_all_exceed: activate the fair row also when all clients are worse than their reference (the paper;
            the authors' code only when some are).
        gradient_source: ``"full"`` for full gradients (the paper), ``"update"`` for local training.
        history_device: where remembered rows live, for instance ``"cpu"``; ``None``: beside the updates.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        theta: float = math.pi / 16,
        s: int = 5,
        beta: float = 1e-4,
        armijo_sign: Literal["paper", "reference"] = "paper",
        angle_test: Literal["paper", "none"] = "paper",
        drop_zero_loss: bool = False,
        force_when_all_exceed: bool = True,
        gradient_source: Literal["full", "update"] = "full",
        history_device: str | None = None,
    ) -> None:
        if not 0 < theta <= math.pi / 2:
            raise ValueError(f"theta of FedMDFG must lie in (0, pi / 2], found {theta}")
        if s < 0:
            raise ValueError(f"s of FedMDFG must not be negative, found {s}")
        if not 0 < beta < 1:
            raise ValueError(f"beta of FedMDFG must lie between 0 and 1, found {beta}")
        full = gradient_source == "full"
        self.needs = Needs(losses=True, requery=True, client_lr=True, full_gradients=full)
        self.theta = theta
        self.s = s
        self.beta = beta
        self.armijo_sign = armijo_sign
        self.angle_test = angle_test
        self.drop_zero_loss = drop_zero_loss
        self.force_when_all_exceed = force_when_all_exceed
        self.history = RowHistory(device=history_device)
        self._reference: dict[int, float] = {}  # R_i

    def aggregate(self, cohort: Cohort) -> Tensor:
        """See the class.

        Raises:
            ValueError: the cohort lacks losses, the learning rate or ``losses_at``, or a row is not finite.
        """
        m, losses, eta = len(cohort), cohort.known_losses.cpu(), cohort.client_lr
        if eta is None or cohort.losses_at is None:
            raise ValueError("client_lr and losses_at must be given: FedMDFG searches along its direction for the step")
        absent = self.history.select(exclude=set(cohort.client_ids))  # S_old \ S_t
        gram = self.history.joint_gram(cohort.updates, absent, cohort.client_ids).cpu()
        check_rows(gram, cohort, "FedMDFG")
        gram = gram.sum(0)  # K [m + h, m + h]
        norms = row_norms(gram)[:m]
        live = norms > ZERO_ROW * norms.max()  # line 5
        if self.drop_zero_loss:
            live &= losses != 0
        if eta == 0 or not bool(live.any()):
            return self._stay(cohort)

        rescale = torch.where(live, norms[live].mean() / norms, 0.0)  # line 6
        scale = torch.cat([rescale, torch.full((len(absent),), eta, dtype=torch.float64)])
        h = self._fair(cohort, losses, live)  # lines 11 to 17
        found = self._direction(cohort, gram, scale, h)  # line 19
        if found is None:
            return self._stay(cohort)
        c, fair, flagged = found
        mean = torch.cat([rescale / live.sum(), torch.zeros(len(absent), dtype=torch.float64)])
        sigma = float(((mean @ gram @ mean).clamp_min(0) / (c @ gram @ c)).sqrt())
        c *= sigma  # line 21: d <- sigma d, as long as the mean of the rescaled rows
        direction = self.history.combine(cohort.updates, c.expand(cohort.updates.layout.num_layers, -1), absent)
        slopes = (gram @ c)[:m] * rescale / eta  # g_i . d per learning rate, in units of the loss

        def ask(length: float) -> Tensor:
            return _losses_at(cohort, torch.sub(cohort.params, direction, alpha=length))[live]

        highest, lowest = 1.0 if absent else 2.0**self.s, 2.0**-self.s / sigma
        search = self._line_search(ask, losses[live], slopes[live], fair, highest, lowest)  # line 24
        if search is None:
            return self._stay(cohort)
        length, evaluations = search

        self._update_reference(cohort, losses, live)  # line 26
        self.history.forget(before=cohort.round + 1)
        clients = {i: cohort.client_ids[i] for i in live.nonzero().flatten().tolist()}
        self.history.remember(cohort.updates, clients, cohort.round, rescale / eta)  # line 27, as gradients
        self.report = StepReport(
            weights=length * c[:m],
            flagged=flagged,
            scalars={
                "step_length": length,
                "evaluations": float(evaluations),
                "fair_row": float(fair),
                "history_rows": float(len(absent)),
            },
        )
        return direction.mul_(length)

    def _stay(self, cohort: Cohort) -> Tensor:
        self.report = StepReport(weights=torch.zeros(len(cohort), dtype=torch.float64), flagged=True)
        return torch.zeros_like(cohort.params)

    def _fair(self, cohort: Cohort, losses: Tensor, live: Tensor) -> Tensor | None:
        """Weights ``h`` ``[m]`` of the fair row, if the model is not fair enough or a client is worse than it was."""
        known = [self._reference.get(i, math.inf) for i in cohort.client_ids]
        exceeds = losses[live] > torch.tensor(known, dtype=torch.float64)[live]
        forced = bool(exceeds.any()) and (self.force_when_all_exceed or not bool(exceeds.all()))
        if loss_angle(losses[live]) <= self.theta and not forced:
            return None
        weights = fair_weights(losses[live])
        return torch.zeros_like(losses).masked_scatter(live, weights) if bool(weights.any()) else None

    def _direction(
        self, cohort: Cohort, gram: Tensor, scale: Tensor, h: Tensor | None
    ) -> tuple[Tensor, bool, bool] | None:
        """Coefficients of the direction, whether the fair row took part, and whether a fallback was needed."""
        m = len(cohort)
        online = torch.where(torch.arange(len(scale)) < m, scale, 0.0)
        attempts = dict.fromkeys((fair, rows) for rows in (True, False) for fair in (h is not None, False))
        for number, (fair, remembered) in enumerate(attempts):
            rows = scale if remembered else online
            row = None if h is None or not fair else torch.nn.functional.pad(h, (0, len(scale) - m)) * rows  # Q h
            c, solved = common_descent(
                gram[None], rows[None], None if row is None else row[None], m, rounding_error(cohort)
            )
            if bool(solved):
                return c[0], fair, number > 0
        return None

    def _line_search(
        self, ask: Callable[[float], Tensor], before: Tensor, slopes: Tensor, fair: bool, highest: float, lowest: float
    ) -> tuple[float, int] | None:
        """Step length in learning rates (Algorithm 2) and number of trials; ``None`` if no trial was finite.

        Args:
            ask: losses after a step of the given length.
            before: losses now.
            slopes: how fast they fall along the direction.
            fair: the fair row is active.
            highest: first length to try.
            lowest: shortest length to try.
        """
        demand = self.beta * slopes if self.armijo_sign == "paper" else -self.beta * slopes
        length, trials = highest, list[tuple[float, float]]()
        while length >= lowest:
            after = ask(length)
            trials.append((length, float(after.sum())))
            fairer = not fair or self.angle_test == "none" or loss_angle(after) < loss_angle(before)
            if fairer and bool((before - after >= length * demand).all()):  # lines 8 and 9
                return length, len(trials)
            length /= 2
        finite = [trial for trial in trials if math.isfinite(trial[1])]
        lower = [trial for trial in finite if trial[1] < float(before.sum())]
        if not finite:
            return None
        chosen = lower[0] if lower else min(finite, key=lambda trial: trial[1])  # lines 16 to 21
        return chosen[0], len(trials)

    def _update_reference(self, cohort: Cohort, losses: Tensor, live: Tensor) -> None:
        """Lets the reference loss ``R_i`` follow a falling loss slowly (section 3.2)."""
        t = cohort.round
        for client, loss, alive in zip(cohort.client_ids, losses.tolist(), live.tolist(), strict=True):
            reference = self._reference.get(client, loss)
            if alive:
                self._reference[client] = (t * reference + loss) / (t + 1) if loss < reference else reference

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the remembered rows, and of the parameters that the line search tries."""
        history = self.history.planned_nbytes(cohort_size, federation.layout, federation.dtype)
        return {"history": history, "line_search": federation.layout.numel * federation.dtype.itemsize}

    def reset(self) -> None:
        """Forgets all clients."""
        self.history.clear()
        self._reference.clear()
        self.report = StepReport()

    def state_dict(self) -> State:
        """Rows of the previous round, and the clients' reference losses."""
        return {
            "history": self.history.state_dict(),
            "clients": torch.tensor(list(self._reference), dtype=torch.int64),
            "reference": torch.tensor(list(self._reference.values()), dtype=torch.float64),
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.history.load_state_dict(state["history"])
        self._reference = dict(zip(state["clients"].tolist(), state["reference"].tolist(), strict=True))


def _losses_at(cohort: Cohort, params: Tensor) -> Tensor:
    if cohort.losses_at is None:
        raise ValueError("losses_at must be given: FedMDFG searches along its direction for the step")
    losses = torch.as_tensor(cohort.losses_at(params)).to("cpu", torch.float64)
    if losses.shape != (len(cohort),):
        raise ValueError(f"losses_at must return {len(cohort)} losses for FedMDFG, found shape {tuple(losses.shape)}")
    return losses
