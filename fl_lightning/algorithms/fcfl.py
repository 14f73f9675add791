# SPDX-License-Identifier: Apache-2.0
"""FCFL: Addressing Algorithmic Disparity and Performance Inconsistency in Federated Learning.

Sen Cui, Weishen Pan, Jian Liang, Changshui Zhang, Fei Wang. NeurIPS 2021.
https://github.com/cuis15/FCFL
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.disparity import (
    Disparities,
    Notion,
    conclusion,
    disparity_gram,
    lowest_score,
    reported_disparities,
    true_disparities,
)
from fl_lightning.algorithms._shared.rows import no_step
from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.records import Federation, Needs, Reading, StepReport
from fl_lightning.arguments import Bounds, check_unused, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.storage.per_client import per_client
from fl_lightning.ops.solvers import linear_program, min_norm


class FCFL(ServerRule):
    """The smallest worst loss among models that keep to every client's disparity budget, then Pareto optimality.

    Clients upload the full gradients of their loss ``l_k`` and of their disparity ``g_k`` between groups of people.
    These are the rows of ``S``. The step is ``S^T c``, and all that decides ``c`` follows from ``K = S S^T``.
    ``SM_d(v) = d ln sum_k exp(v_k / d)`` stands in for a maximum (equation 10): its gradient weighs the clients by
    ``softmax(v / d)``. With ``g'_k = g_k - eps_k``, the disparity in excess of the budget:

    Stage 1 (equations 12 and 13) moves in the hull of the gradients of ``SM(l)`` and ``SM(g')``: down ``SM(l)`` while
    all budgets hold, else down ``SM(g')`` without a rise of ``SM(l)``. Stage 2 (equation 15) lowers the mean loss in
    the hull of the clients' loss gradients and that of ``SM(g')``, without a rise of any loss or of ``SM(g')``.

    Budgets are kept by a differentiable surrogate of the disparity, which may be larger itself: a fit ends with a line
    about both. A client whose disparity is undefined counts with its loss only. Where rounding leaves the linear
    program of stage 2 without a solution, the shortest vector of the hull takes over, and the report is flagged. If all
    rows are zero, so is the step; it is flagged and no state changes.

    Args:
        budget: ``eps``, one number for all clients or one per client by id; ``None`` constrains nothing (appendix F.1,
            where stage 1 follows ``SM(l)``), and the module need not know groups.
        notion: ``"dp"`` for demographic parity, ``"eo"`` for equal opportunity.
        stage1_rounds: rounds after which stage 2 begins.
        tol: stage 2 also begins when the direction, as a gradient, is no longer than this, or than 1e-6 times the
            gradients that it combines, which is rounding.
        delta: first ``d`` of both soft maxima.
        beta: factor by which ``d`` shrinks, down to 1e-4.
        sharpness: ``c`` of the surrogate ``sigmoid(c z)`` that stands in for the prediction ``1[z > 0]`` in training.
        num_groups: groups of people. The paper has two; of more, ``g_k`` is the largest difference between two, so that
            a budget holds for every pair, and its gradient that of one such pair.
        reading: whose form four steps take, as docs/methods/fcfl.md lists. ``"paper"`` shrinks both ``d`` when the
            squared norm of the direction is at most 1e-3 (equation 14, where the paper gives no value); ``"code"`` lets
            budgets be overshot.

    Raises:
        ValueError: an argument is out of range.
    """

    layers = "model"
    needs = Needs(losses=True, full_gradients=True, client_lr=True)
    reads = "gram"

    rounds = server_state(0)
    second = server_state(False)  # stage 2 has begun before its time
    d_loss, d_disparity = server_state(float), server_state(float)  # of the soft maxima, once they shrank
    surrogates, disparities = per_client(float), per_client(float)  # as the clients last reported them
    lowest = server_state(math.inf)  # score of any sample in any round

    _delta_factor, _delta_floor = 0.1, 1e-4  # d shrinks where 0.1 ||grad SM|| <= d, and stays once it is below 1e-4
    _joint_threshold = 1e-3  # eps_d of equation 14
    _standstill = 1e-6  # a direction this much shorter than the gradients it is made of may be their rounding

    @checked(
        budget=Bounds(0, filled=True),
        stage1_rounds=Bounds(0),
        tol=Bounds(0),
        delta=Bounds(above=0),
        beta=Bounds(above=0, most=1),
        sharpness=Bounds(above=0),
        num_groups=Bounds(2),
    )
    def __init__(
        self,
        budget: float | Sequence[float] | None = 0.1,
        notion: Notion = "dp",
        stage1_rounds: int = 800,
        tol: float = 0.0,
        delta: float = 0.5,
        beta: float = 0.01,
        sharpness: float = 10.0,
        num_groups: int = 2,
        reading: Reading = "library",
    ) -> None:
        if budget is None:
            check_unused("notion of FCFL", notion, "dp", "with budget=None, which constrains nothing")
            check_unused("sharpness of FCFL", sharpness, 10.0, "with budget=None, which constrains nothing")
            check_unused("num_groups of FCFL", num_groups, 2, "with budget=None, which constrains nothing")
        if stage1_rounds == 0:
            check_unused("tol of FCFL", tol, 0.0, "with stage1_rounds=0, which begins with stage 2")
        self.budget = tuple(budget) if isinstance(budget, Sequence) else budget
        self.stage1_rounds, self.tol = stage1_rounds, tol
        self.notion, self.sharpness, self.num_groups, self.reading = notion, sharpness, num_groups, reading
        self.delta, self.beta = float(delta), float(beta)  # go into checkpoints, which hold no numbers of numpy
        self._smooth_feasibility = self._joint_sharpening = self._hull_of_clients = reading == "paper"
        self._bounds_when_tight = reading == "code"
        measured = Disparities("FCFL", notion, sharpness, num_groups)
        self._client = ClientRule() if budget is None else measured

    @property
    def stage(self) -> int:
        """1 or 2, of the next round."""
        return 2 if self.second or self.rounds >= self.stage1_rounds else 1

    def begin_fit(self, federation: Federation) -> None:
        """Checks that every client has a budget.

        Raises:
            ValueError: there are more or fewer budgets than clients.
        """
        if isinstance(self.budget, tuple) and len(self.budget) != federation.num_clients:
            expected = f"one number for all clients, or one for each of the {federation.num_clients} clients"
            raise ValueError(f"budget of FCFL must be {expected}, found {len(self.budget)}")

    def aggregate(self, cohort: Cohort) -> Tensor:
        """See the class."""
        m, losses, eta = len(cohort), cohort.known_losses, cohort.client_lr
        if eta is None:
            raise ValueError("client_lr must be given: FCFL compares norms of gradients")
        excess, companions, true = torch.full_like(losses, torch.nan), None, None
        if self.budget is not None:
            disparities, companions = reported_disparities(cohort, "FCFL")
            budgets = self._budgets(cohort.client_ids)
            excess, true = disparities - budgets, self._true_excess(cohort, disparities, budgets)  # g'_k = g_k - eps_k
        gram = disparity_gram(cohort, companions, "FCFL")  # K [2m, 2m]
        if not bool(gram.any()):
            return no_step(self, cohort)

        d_loss, d_disparity = self.d_loss or self.delta, self.d_disparity or self.delta
        known, unit = ~excess.isnan(), torch.eye(2 * m, dtype=torch.float64)
        c_loss = torch.softmax(losses / d_loss, 0) @ unit[:m]  # the gradient of SM(l) is S^T c_loss
        c_disparity = torch.softmax(excess[known] / d_disparity, 0) @ unit[m:][known]  # that of SM(g')
        feasible = budgets_hold(excess[known], d_disparity if self._smooth_feasibility else None)
        stage, flagged, a = self.stage, False, 0.0
        if stage == 1:
            a = min_max(gram, c_loss, c_disparity, feasible) if bool(known.any()) else 0.0
            c = (1 - a) * c_loss + a * c_disparity
        else:
            tight = bool((excess[known] >= 0).any())
            bound = bool(known.any()) and (tight or not self._bounds_when_tight)
            # The gradient of SM(g') leaves the hull with its constraint: the code replaces both by zeros.
            smooth = c_disparity[None] if bound else c_disparity[None][:0]
            c, flagged = pareto(gram, unit[:m], smooth, unit[m:][known] if self._hull_of_clients else smooth)
        norms = [math.sqrt(max(float(v @ gram @ v), 0.0)) / eta for v in (c_loss, c_disparity, c)]
        self._advance(norms[0], norms[1] if bool(known.any()) else math.inf, norms[2], a)

        scalars = {"stage": float(stage), "direction_norm": norms[2], "delta_loss": d_loss}
        if companions is not None:
            scalars |= {"delta_disparity": d_disparity, "feasible": float(feasible)}
            scalars |= {"without_group": float((~known).sum())}
            scalars |= {"excess": float(excess[known].max())} if bool(known.any()) else {}
            if true is not None and bool(known.any()):
                scalars |= {"true_excess": float(true[known].max())}
        self.report = StepReport(weights=c[:m], flagged=flagged, scalars=scalars)
        step = cohort.updates.combine(c[:m])
        return step if companions is None else companions.combine(c[m:], out=step)

    def _true_excess(self, cohort: Cohort, surrogates: Tensor, budgets: Tensor) -> Tensor | None:
        """``[m]`` of the true disparities, which it remembers; ``None`` if clients have not counted predictions."""
        true = true_disparities(cohort)
        if true is None:
            return None
        self.surrogates.put(cohort.client_ids, surrogates)
        self.disparities.put(cohort.client_ids, true)
        self.lowest = min(self.lowest, lowest_score(cohort))
        return true - budgets

    def _budgets(self, ids: Sequence[int]) -> Tensor:
        if isinstance(self.budget, tuple) and not 0 <= min(ids) <= max(ids) < len(self.budget):
            found = f"{len(self.budget)} for clients {ids}"
            raise ValueError(f"budget of FCFL must have an entry for every client id, found {found}")
        return torch.tensor([self._budget_of(client) for client in ids], dtype=torch.float64)

    def _budget_of(self, client: int) -> float:
        return self.budget[client] if isinstance(self.budget, tuple) else (self.budget or 0.0)

    def end_fit(self) -> str | None:
        """How the budgets were kept; warns of clients above theirs."""
        return conclusion(
            "FCFL", self.notion, dict(self.surrogates), dict(self.disparities), self.lowest, self._budget_of
        )

    def _advance(self, loss_norm: float, disparity_norm: float, norm: float, a: float) -> None:
        """Sharpens the soft maxima after a round of stage 1 (equation 14), and begins stage 2 when it is time.

        ``norm`` is that of the direction ``(1 - a) grad SM(l) + a grad SM(g')``, the others are those of its parts;
        ``||grad SM(g')||`` is infinite without any.
        """
        stage, d_loss, d_disparity = self.stage, self.d_loss or self.delta, self.d_disparity or self.delta
        self.rounds += 1
        if stage == 2:
            return
        flat_loss = self._delta_factor * loss_norm <= d_loss
        flat_disparity = self._delta_factor * disparity_norm <= d_disparity
        if self._joint_sharpening:
            flat_loss = flat_disparity = norm**2 <= self._joint_threshold
        if flat_loss and d_loss > self._delta_floor:
            self.d_loss = d_loss * self.beta
        if flat_disparity and d_disparity > self._delta_floor:
            self.d_disparity = d_disparity * self.beta
        # A short gradient that is the direction alone is no rounding: only what is combined cancels.
        longest = max((1 - a) * loss_norm, a * disparity_norm if a > 0 else 0.0)
        self.second = norm <= max(self.tol, self._standstill * longest)


def budgets_hold(excess: Tensor, smooth: float | None) -> bool:
    """Whether no disparity exceeds its budget (equation 11b), from ``[m]`` how far they do.

    ``smooth`` is the ``d`` of the soft maximum that must not be positive; ``None``: the maximum itself.
    """
    if len(excess) > 0 and smooth is not None:
        return float(smooth * torch.logsumexp(excess / smooth, 0)) <= 0
    return bool((excess <= 0).all())


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


def pareto(gram: Tensor, losses: Tensor, bounds: Tensor, spanned: Tensor) -> tuple[Tensor, bool]:
    """Coefficients of stage 2 (equation 15), and whether the shortest vector of the hull had to take over.

    The direction lowers the mean loss most, in the hull of the clients' loss gradients and ``spanned``, without a rise
    of any loss or bound. From ``K [k, k]`` and coefficients of the gradients: ``losses [m, k]`` of the clients,
    ``bounds [b, k]`` of other functions that must not rise, and ``spanned [d, k]`` of what else is in the hull.
    """
    constraints, hull = torch.cat([losses, bounds]), torch.cat([losses, spanned])
    slopes = hull @ gram  # row j: products of all rows of S with direction j of the hull
    solution = linear_program(slopes @ losses.mean(0), -(constraints @ slopes.T), torch.zeros(len(constraints)))
    if solution.status == "optimal":
        return solution.x @ hull, False
    return min_norm(slopes @ hull.T) @ hull, True
