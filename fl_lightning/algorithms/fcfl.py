# SPDX-License-Identifier: Apache-2.0
"""FCFL: Addressing Algorithmic Disparity and Performance Inconsistency in Federated Learning.

Sen Cui, Weishen Pan, Jian Liang, Changshui Zhang, Fei Wang. NeurIPS 2021.
https://github.com/cuis15/FCFL
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.disparity import (
    Disparities,
    Notion,
    check_choice,
    joint_gram,
    reported_disparities,
)
from fl_lightning.algorithms.base import ClientRule, Federation, Needs, ServerRule, State, StepReport
from fl_lightning.core.cohort import Cohort
from fl_lightning.solvers import linear_program, min_norm


class FCFL(ServerRule):
    """The smallest worst loss among models that keep to every client's disparity budget, then Pareto optimality.

    Clients upload the full gradients of their loss ``l_k`` and of their disparity ``g_k`` between two groups of people.
    These are the rows of ``S``. The step is ``S^T c``, and all that decides ``c`` follows from ``K = S S^T``.
    ``SM_d(v) = d ln sum_k exp(v_k / d)`` stands in for a maximum (equation 10): its gradient weighs the clients by
    ``softmax(v / d)``. With ``g'_k = g_k - eps_k``, the disparity in excess of the budget:

    Stage 1 (equations 12 and 13) moves in the hull of the gradients of ``SM(l)`` and ``SM(g')``: down ``SM(l)`` while
    all budgets hold, else down ``SM(g')`` without a rise of ``SM(l)``. Stage 2 (equation 15) lowers the mean loss in
    the hull of the clients' loss gradients and that of ``SM(g')``, without a rise of any loss or of ``SM(g')``.

    Degenerate cases. A client whose disparity is undefined keeps its loss and is left out of all that concerns
    disparities, counted in the log as ``without_group``; if that is everybody, the round is unconstrained. A budget of
    0 is hardly ever met, so stage 1 keeps to equation 13. Where the linear program of stage 2 has no solution, which
    rounding can bring about at a Pareto point, the shortest vector of the hull takes over, along which nothing rises
    either, and the report is flagged. If all rows are zero, so is the step; it is flagged and no state changes.

    Args:
        budget: ``eps``, one number for all clients or one per client by id; ``None`` constrains nothing (appendix F.1,
            where stage 1 follows ``SM(l)``), and the module need not know groups.
        notion: ``"dp"`` for demographic parity, ``"eo"`` for equal opportunity.
        stage1_rounds: rounds after which stage 2 begins.
        tol: stage 2 also begins when the direction, as a gradient, is no longer than this.
        delta: first ``d`` of both soft maxima.
        beta: factor by which ``d`` shrinks.
        delta_factor: ``d`` shrinks when this times the norm of its soft maximum's gradient is at most ``d``.
        delta_floor: ``d`` stays once it is at most this.
        sharpness: ``c`` of the surrogate ``sigmoid(c z)`` that stands in for the prediction ``1[z > 0]`` in training.
        feasibility: budgets hold if no ``g'_k`` is positive (``"max"``, the authors' code), or if ``SM(g')`` is not
            (``"smooth"``, the paper), which asks for more while ``d`` is large.
        sharpen: ``"independent"`` as said above (the authors' code); ``"joint"``: both ``d`` shrink when the squared
            norm of the direction is at most ``joint_threshold`` (equation 14).
        joint_threshold: ``eps_d`` of equation 14, to which the paper gives no value.
        stage2_hull: the disparity gradients in the hull: ``"smooth"``, that of ``SM(g')`` (the authors' code), or
            ``"clients"``, every client's (the paper).
        stage2_constraint: ``SM(g')`` must not rise: ``"always"`` (the paper), or ``"violated"``, only while a budget is
            not kept with room to spare (the authors' code), so that budgets are overshot.

    Attributes:
        stage: 1 or 2, of the next round.

    Raises:
        ValueError: an argument is out of range.
    """

    layers = "model"
    needs = Needs(losses=True, full_gradients=True, client_lr=True)

    def __init__(
        self,
        budget: float | Sequence[float] | None = 0.1,
        notion: Notion = "dp",
        stage1_rounds: int = 800,
        tol: float = 0.0,
        delta: float = 0.5,
        beta: float = 0.01,
        delta_factor: float = 0.1,
        delta_floor: float = 1e-4,
        sharpness: float = 10.0,
        feasibility: Literal["max", "smooth"] = "max",
        sharpen: Literal["independent", "joint"] = "independent",
        joint_threshold: float = 1e-3,
        stage2_hull: Literal["smooth", "clients"] = "smooth",
        stage2_constraint: Literal["always", "violated"] = "always",
    ) -> None:
        self.budget = tuple(budget) if isinstance(budget, Sequence) else budget
        budgets = self.budget if isinstance(self.budget, tuple) else (self.budget or 0.0,)
        if not (budgets and all(0 <= eps < math.inf for eps in budgets)):
            raise ValueError(f"budget of FCFL must be finite and not negative, found {budget}")
        if not (delta > 0 and 0 < beta <= 1 and delta_floor > 0):
            found = f"delta={delta}, beta={beta}, delta_floor={delta_floor}"
            raise ValueError(f"delta and delta_floor of FCFL must be positive and beta in (0, 1], found {found}")
        for name, value in (
            ("stage1_rounds", stage1_rounds),
            ("tol", tol),
            ("delta_factor", delta_factor),
            ("joint_threshold", joint_threshold),
        ):
            if not value >= 0:
                raise ValueError(f"{name} of FCFL must not be negative, found {value}")
        check_choice("FCFL", "feasibility", feasibility, ("max", "smooth"))
        check_choice("FCFL", "sharpen", sharpen, ("independent", "joint"))
        check_choice("FCFL", "stage2_hull", stage2_hull, ("smooth", "clients"))
        check_choice("FCFL", "stage2_constraint", stage2_constraint, ("always", "violated"))
        self.stage1_rounds, self.tol = stage1_rounds, tol
        self.delta, self.beta = float(delta), float(beta)  # go into checkpoints, which hold no numbers of numpy
        self.delta_factor, self.delta_floor = delta_factor, delta_floor
        self.feasibility, self.sharpen, self.joint_threshold = feasibility, sharpen, joint_threshold
        self.stage2_hull, self.stage2_constraint = stage2_hull, stage2_constraint
        measured = Disparities("FCFL", notion, sharpness)
        self._client = ClientRule() if budget is None else measured
        self.stage, self._rounds, self._delta_loss, self._delta_disparity = 1, 0, self.delta, self.delta
        self.reset()

    def client_rule(self) -> ClientRule:
        """Measures disparities and their gradients; the same object on every call."""
        return self._client

    def begin_fit(self, federation: Federation) -> None:
        """Checks that every client has a budget.

        Raises:
            ValueError: there are more or fewer budgets than clients.
        """
        if isinstance(self.budget, tuple) and len(self.budget) != federation.num_clients:
            raise ValueError(
                "budget of FCFL must be one number for all clients, or one for each of the "
                f"{federation.num_clients} clients, found {len(self.budget)}"
            )

    def aggregate(self, cohort: Cohort) -> Tensor:
        """See the class.

        Raises:
            ValueError: the cohort lacks losses, disparities or the learning rate, or a row is not finite.
        """
        m, losses, eta = len(cohort), cohort.known_losses.cpu(), cohort.client_lr
        if eta is None:
            raise ValueError("client_lr must be given: FCFL compares norms of gradients")
        excess, companions = torch.full_like(losses, torch.nan), None
        if self.budget is not None:
            disparities, companions = reported_disparities(cohort, "FCFL")
            excess = self.excess(cohort, disparities)
        gram = joint_gram(cohort, companions, "FCFL")  # K [2m, 2m]
        if not bool(gram.any()):
            self.report = StepReport(weights=torch.zeros_like(losses), flagged=True)
            return torch.zeros_like(cohort.params)

        known, unit = ~excess.isnan(), torch.eye(2 * m, dtype=torch.float64)
        c_loss = torch.softmax(losses / self._delta_loss, 0) @ unit[:m]  # the gradient of SM(l) is S^T c_loss
        c_disparity = torch.softmax(excess[known] / self._delta_disparity, 0) @ unit[m:][known]  # that of SM(g')
        feasible = self._feasible(excess[known])
        stage, delta_loss, delta_disparity, flagged = self.stage, self._delta_loss, self._delta_disparity, False
        if stage == 1:
            a = min_max(gram, c_loss, c_disparity, feasible) if bool(known.any()) else 0.0
            c = (1 - a) * c_loss + a * c_disparity
        else:
            tight = bool((excess[known] >= 0).any())
            c, flagged = self._pareto(gram, unit[:m], unit[m:][known], c_disparity[None], tight)
        norms = [math.sqrt(max(float(v @ gram @ v), 0.0)) / eta for v in (c_loss, c_disparity, c)]
        self._advance(norms[0], norms[1] if bool(known.any()) else math.inf, norms[2])

        scalars = {"stage": float(stage), "direction_norm": norms[2], "delta_loss": delta_loss}
        if companions is not None:
            missing = float((~known).sum())
            scalars |= {"delta_disparity": delta_disparity, "feasible": float(feasible), "without_group": missing}
            scalars |= {"excess": float(excess[known].max())} if bool(known.any()) else {}
        self.report = StepReport(weights=c[:m], flagged=flagged, scalars=scalars)
        step = cohort.updates.combine(c[:m])
        return step if companions is None else companions.combine(c[m:], out=step)

    def excess(self, cohort: Cohort, disparities: Tensor) -> Tensor:
        """``g'_k = g_k - eps_k`` ``[m]``, NaN where the disparity is undefined.

        Raises:
            ValueError: a client has no budget.
        """
        if not isinstance(self.budget, tuple):
            return disparities - (self.budget or 0.0)
        if not 0 <= min(cohort.client_ids) <= max(cohort.client_ids) < len(self.budget):
            found = f"{len(self.budget)} for clients {cohort.client_ids}"
            raise ValueError(f"budget of FCFL must have an entry for every client id, found {found}")
        return disparities - torch.tensor([self.budget[client] for client in cohort.client_ids], dtype=torch.float64)

    def _feasible(self, excess: Tensor) -> bool:
        """Whether all budgets hold (equation 11b)."""
        if len(excess) == 0:
            return True
        delta = self._delta_disparity
        worst = excess.max() if self.feasibility == "max" else delta * torch.logsumexp(excess / delta, 0)
        return float(worst) <= 0

    def _pareto(
        self, gram: Tensor, losses: Tensor, disparities: Tensor, smooth: Tensor, tight: bool
    ) -> tuple[Tensor, bool]:
        """Coefficients of equation 15, and whether the shortest vector of the hull had to take over.

        Args:
            gram: ``K``.
            losses: ``[m, 2m]`` coefficients of the loss gradients.
            disparities: ``[d, 2m]`` of the clients' disparity gradients, where these are defined.
            smooth: ``[1, 2m]`` of the gradient of ``SM(g')``.
            tight: a budget is exceeded or just met.
        """
        bound = len(disparities) > 0 and (self.stage2_constraint == "always" or tight)
        constraints = torch.cat([losses, smooth]) if bound else losses
        # With 'smooth' the disparity gradient leaves the hull with its constraint: the code replaces both by zeros.
        spanned = disparities if self.stage2_hull == "clients" else smooth if bound else smooth[:0]
        hull = torch.cat([losses, spanned])
        slopes = hull @ gram  # row j: products of all rows of S with direction j of the hull
        solution = linear_program(slopes @ losses.mean(0), -(constraints @ slopes.T), torch.zeros(len(constraints)))
        if solution.status == "optimal":
            return solution.x @ hull, False
        return min_norm(slopes @ hull.T) @ hull, True

    def _advance(self, loss_norm: float, disparity_norm: float, norm: float) -> None:
        """Sharpens the soft maxima after a round of stage 1 (equation 14), and begins stage 2 when it is time."""
        self._rounds += 1
        if self.stage == 2:
            return
        flat = [self.delta_factor * loss_norm <= self._delta_loss]
        flat += [self.delta_factor * disparity_norm <= self._delta_disparity]
        if self.sharpen == "joint":
            flat = [norm**2 <= self.joint_threshold] * 2
        if flat[0] and self._delta_loss > self.delta_floor:
            self._delta_loss *= self.beta
        if flat[1] and self._delta_disparity > self.delta_floor:
            self._delta_disparity *= self.beta
        if self._rounds >= self.stage1_rounds or norm <= self.tol:
            self.stage = 2

    def reset(self) -> None:
        """Starts with stage 1."""
        self.stage, self._rounds = 1 if self.stage1_rounds > 0 else 2, 0
        self._delta_loss = self._delta_disparity = self.delta
        self.report = StepReport()

    def state_dict(self) -> State:
        """Stage, rounds so far, and both ``d``."""
        return {
            "stage": self.stage,
            "rounds": self._rounds,
            "delta_loss": self._delta_loss,
            "delta_disparity": self._delta_disparity,
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.stage, self._rounds = state["stage"], state["rounds"]
        self._delta_loss, self._delta_disparity = state["delta_loss"], state["delta_disparity"]


def min_max(gram: Tensor, c_loss: Tensor, c_disparity: Tensor, feasible: bool) -> float:
    """Share ``a`` of the disparity gradient in the direction ``(1 - a) S^T c_loss + a S^T c_disparity`` of stage 1.

    The closed forms of the linear programs in equations 12 (``feasible``) and 13, which have one variable.
    """
    ll, lg, gg = (float(v @ gram @ w) for v, w in ((c_loss, c_loss), (c_loss, c_disparity), (c_disparity, c_disparity)))
    if feasible:
        return 0.0 if ll >= lg else 1.0
    if lg >= 0:
        return 1.0 if gg >= lg else 0.0
    return ll / (ll - lg)  # at a right angle to the loss gradient
