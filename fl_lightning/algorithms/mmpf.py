# SPDX-License-Identifier: Apache-2.0
"""MMPF: Minimax Pareto Fairness: A Multi Objective Perspective (experimental).

Natalia Martinez, Martin Bertran, Guillermo Sapiro. ICML 2020. https://github.com/natalialmg/MMPF
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.weighting import shares, stands_still, weighted_mean
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Needs, StepReport
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.storage.per_client import per_client


class MMPF(ServerRule):
    """Searches for the weights of the clients' losses under which the worst one is smallest (APStar).

    For ``inner_rounds`` rounds the model trains on ``sum_k mu_k l_k``. If its largest loss is then lower than that of
    the model kept so far, on the same clients, the model is kept and ``K``, which starts at 1, is set back to at most
    ``k_min``. Otherwise ``K`` grows by 1, and training starts again from the kept model. Either way ``mu`` moves by
    ``alpha / K`` towards the clients whose loss is not below the kept model's largest. In the end, and in evaluation,
    the model is the kept one.

    Experimental: the method was made for groups in one data set, and docs/methods/mmpf.md says what was decided here.
    With partial participation ``mu`` is scaled to the participants and moves among them alone; clients not yet seen
    weigh what they would in uniform weights. If all rows are zero, so is the step; it is flagged and nothing changes.
    A server optimizer is refused: it would not go back to the kept model.

    Args:
        inner_rounds: rounds of training under one ``mu``.
        iterations: how many ``mu`` to try; the kept model stays in place afterwards.
        patience: stop after this many ``mu`` in a row without a better model.
        alpha: step size of ``mu``, in (0, 1).
        k_min: largest ``K`` after a better model was found.

    Raises:
        ValueError: an argument is out of range.
    """

    needs = Needs(losses=True, requery=True, exact_step=True)
    reads = "sums"

    mu = per_client(float)  # up to a factor; 1 for clients not yet seen
    k, inner, iteration, failures = server_state(1), server_state(0), server_state(0), server_state(0)
    best = server_state(float)  # the kept model's largest loss when it was last judged
    best_params = server_state(Tensor)

    @checked(
        inner_rounds=Bounds(1),
        iterations=Bounds(1),
        patience=Bounds(1),
        alpha=Bounds(above=0, below=1),
        k_min=Bounds(1),
    )
    def __init__(
        self, inner_rounds: int = 20, iterations: int = 15, patience: int = 15, alpha: float = 0.5, k_min: int = 20
    ) -> None:
        self.inner_rounds, self.iterations, self.patience = inner_rounds, iterations, patience
        self.alpha, self.k_min = alpha, k_min

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_k mu_k u_k``, or the way back to the model that was kept."""
        losses = cohort.known_losses
        if cohort.losses_at is None:
            raise ValueError("losses_at must be given: MMPF compares its model with the kept one on the same clients")
        step = weighted_mean(cohort, self._weights(cohort))  # also refuses rows that are not finite
        if stands_still(cohort):
            self.report = StepReport(weights=self._weights(cohort), flagged=True, scalars=self._scalars())
            return step
        back = None
        if self._finished():
            back = self.best_params
        elif self.inner == self.inner_rounds:
            kept = self.best_params
            there = math.inf if kept is None else float(cohort.losses_at(kept.to(cohort.params)).max())
            better = self._judge(cohort, losses, there)
            back = None if better and not self._finished() else self.best_params
        if back is not None:
            self.report = StepReport(weights=torch.zeros_like(losses), scalars=self._scalars())
            return cohort.params - back.to(cohort.params)
        self.inner += 1
        weights = self._weights(cohort)
        self.report = StepReport(weights=weights, scalars=self._scalars())
        return weighted_mean(cohort, weights)

    def _judge(self, cohort: Cohort, losses: Tensor, kept: float) -> bool:
        """Ends an iteration: keeps the model if it is better than the one so far, and moves ``mu``.

        ``losses [m]`` are the judging clients' at the present model, ``kept`` is the largest of theirs at the kept one.
        """
        worst = float(losses.max())
        better = not worst >= kept  # also where the kept model has no finite loss here
        if better:
            self.best_params = cohort.params.clone()
            self.k, self.failures = min(self.k, self.k_min), 0
        else:
            self.k, self.failures = self.k + 1, self.failures + 1
        self.best = best = worst if better else kept
        self.inner, self.iteration = 0, self.iteration + 1
        behind = (losses >= best).double()
        mu, mass = self._weights(cohort), sum(self.mu.get(client, 1.0) for client in cohort.client_ids)
        mu = shares((1 - self.alpha) * mu + self.alpha / self.k * shares(behind))
        self.mu.put(cohort.client_ids, mass * mu)
        return better

    def _weights(self, cohort: Cohort) -> Tensor:
        """``mu`` of the participants, scaled to sum to 1."""
        return shares(self.mu.vector(cohort.client_ids, 1.0))

    def _finished(self) -> bool:
        return self.iteration >= self.iterations or self.failures >= self.patience

    def _scalars(self) -> dict[str, float]:
        known = {} if self.best is None else {"best_worst_loss": self.best}
        return {"iteration": float(self.iteration), **known}

    def evaluation_params(self, params: Tensor) -> Tensor:
        """The model that was kept; ``params`` until there is one."""
        return params if self.best_params is None else self.best_params.to(params)
