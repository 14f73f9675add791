# SPDX-License-Identifier: Apache-2.0
"""A method of one's own, after FairMOO: narrow the spread of the losses while it is wide, else descend in common."""

from __future__ import annotations

import torch

import fl_lightning as fl
from fl_lightning.algorithms import Needs, ServerRule, StepReport


class FairMOO(ServerRule):
    """Steps along the gradient of the losses' variance while it is above ``prefer``, else along a common descent.

    With updates ``u_i`` and losses ``l_i`` the first is ``g = (2 / m) sum_i (l_i - mean l) u_i``. The second is the
    shortest vector ``d`` of the updates' hull; where ``<d, g> < 0``, it would widen the spread, and is projected off
    ``g``. Either is made as long as the updates are on average; where nothing is left of it, the step is zero.
    """

    needs = Needs(losses=True)
    reads = "gram"

    def __init__(self, prefer: float = 0.01) -> None:
        if prefer < 0:
            raise ValueError(f"prefer must be at least 0, found {prefer}")
        self.prefer = prefer

    def aggregate(self, cohort: fl.Cohort) -> torch.Tensor:
        """The step ``[n]``."""
        losses, gram = cohort.known_losses.cpu().double(), cohort.updates.gram().sum(0).cpu()  # over the layers
        target = gram.diagonal().sqrt().mean()
        if not target.isfinite():
            return fl.algorithms.weighted_mean(cohort, gram.diagonal())  # which names the client
        spread = losses - losses.mean()
        narrowing = 2 / len(losses) * spread
        variance = float(spread.square().mean())
        if variance > self.prefer:
            weights = narrowing
        else:
            weights = fl.solvers.min_norm(gram)
            along = weights @ gram @ narrowing  # <d, g>
            if along < 0:
                weights = weights - along / (narrowing @ gram @ narrowing) * narrowing
        length = (weights @ gram @ weights).clamp_min(0).sqrt()
        moves = bool(length > 1e-6 * target)
        weights = weights * (target / length) if moves else torch.zeros_like(weights)
        self.report = StepReport(weights=weights, flagged=not moves, scalars={"variance": variance})
        return fl.algorithms.weighted_mean(cohort, weights)
