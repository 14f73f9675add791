# SPDX-License-Identifier: Apache-2.0
"""AFL: Agnostic Federated Learning.

Mehryar Mohri, Gary Sivek, Ananda Theertha Suresh. ICML 2019. https://arxiv.org/abs/1902.00146
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.weighting import stands_still, uniform_weights, weighted_mean
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Federation, Needs, StepReport
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.storage.per_client import per_client
from fl_lightning.ops.solvers.simplex import project_simplex

NO_MASS = 1e-12  # less than this of lambda is what projections leave by rounding


class AFL(ServerRule):
    """Minimises the worst mixture of the clients' losses (Stochastic-AFL).

    Clients are weighted by ``lambda``, a point of the simplex over all registered clients that starts uniform and
    climbs along the losses. What is evaluated, and what the module holds after the fit, is the mean of all global
    models but the initial one. Buffers such as BatchNorm statistics are those of the last model.

    The paper has every client in every round. With fewer, weights are ``lambda`` divided by its sum over the
    participants, among whom alone the projection moves it.

    Degenerate cases. Participants with less than 1e-12 of ``lambda`` among them count alike and keep theirs, and the
    report is flagged. If all rows are zero, the step is zero, flagged, and nothing changes. Without ``num_clients`` in
    the cohort, clients seen for the first time join with the mean ``lambda`` of those known.

    Args:
        lambda_lr: step size of the ascent, ``gamma_lambda``; 0 leaves all clients alike.
        full_participation: refuse rounds in which a client is missing.

    Raises:
        ValueError: ``lambda_lr`` is negative or not finite.
    """

    needs = Needs(losses=True)
    reads = "sums"
    averages = True

    lam = per_client(float)  # lambda
    rounds = server_state(0)  # global models since the initial one
    mean = server_state(Tensor, wide=True)  # of all of them but the newest

    @checked(lambda_lr=Bounds(0))
    def __init__(self, lambda_lr: float = 0.01, full_participation: bool = False) -> None:
        self.lambda_lr = lambda_lr
        self.full_participation = full_participation

    def clients_changed(self, federation: Federation, sizes: Tensor) -> None:
        """``lambda`` sums to 1 over the present clients, of whom those without one have the mean."""
        mass, due = sum(self.lam.values()), len(self.lam) / federation.num_clients
        self.lam.update({k: due * v / mass if mass > NO_MASS else 1 / len(sizes) for k, v in self.lam.items()})

    def begin_fit(self, federation: Federation) -> None:
        """Checks the size of cohorts.

        Raises:
            ValueError: rounds are to have fewer clients than there are, against ``full_participation``.
        """
        if self.full_participation and federation.cohort_size is not None:
            self._require_all(federation.cohort_size, federation.num_clients)

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_i lambda_i u_i``, then moves ``lambda`` along the losses."""
        losses, ids = cohort.known_losses, cohort.client_ids
        if self.full_participation and cohort.num_clients is not None:
            self._require_all(len(cohort), cohort.num_clients)
        known = self._with_newcomers(cohort)
        lam = torch.tensor([known[client] for client in ids], dtype=torch.float64)
        mass = float(lam.sum())
        has_mass = mass > NO_MASS
        weights = lam / mass if has_mass else uniform_weights(cohort)
        step = weighted_mean(cohort, weights)
        if stands_still(cohort):
            self.report = StepReport(weights=weights, flagged=True)
            return step
        if has_mass:
            lam = mass * project_simplex(weights + self.lambda_lr / mass * losses)
        self.lam.update(known | dict(zip(ids, lam.tolist(), strict=True)))
        self._remember(cohort.params)
        self.report = StepReport(weights=weights, flagged=not has_mass)
        return step

    def _require_all(self, found: int, registered: int) -> None:
        if found < registered:
            raise ValueError(
                f"AFL(full_participation=True) needs all {registered} clients in every round, found {found}: use "
                "clients_per_round=1.0 without drop-outs, or full_participation=False"
            )

    def _with_newcomers(self, cohort: Cohort) -> dict[int, float]:
        """``lambda`` of all clients that are known once this round is over."""
        new = [client for client in cohort.client_ids if client not in self.lam]
        if cohort.num_clients is not None:
            return dict(self.lam) | dict.fromkeys(new, 1 / cohort.num_clients)
        total = len(self.lam) + len(new)
        scaled = {client: value * len(self.lam) / total for client, value in self.lam.items()}
        return scaled | dict.fromkeys(new, 1 / total)

    def _remember(self, params: Tensor) -> None:
        """Counts a round; its parameters are the model that the round before led to, if there was one."""
        if self.rounds > 0:
            wide = params.to(torch.promote_types(params.dtype, torch.float32))
            mean = torch.zeros_like(wide) if self.mean is None else self.mean.to(wide)
            self.mean = mean + (wide - mean) / self.rounds
        self.rounds += 1

    def evaluation_params(self, params: Tensor) -> Tensor:
        """The mean of ``params``, the newest model, and those before."""
        if self.mean is None:
            return params
        mean = self.mean.to(params.device)
        return (mean + (params.to(mean.dtype) - mean) / self.rounds).to(params.dtype)
