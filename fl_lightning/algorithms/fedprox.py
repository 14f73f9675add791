# SPDX-License-Identifier: Apache-2.0
"""FedProx: Federated Optimization in Heterogeneous Networks.

Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia Smith. MLSys 2020.
https://arxiv.org/abs/1812.06127
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.records import LocalWork, Needs
from fl_lightning.arguments import Bounds, checked


class FedProx(FedAvg):
    """FedAvg whose clients are pulled towards the global model (Algorithm 2).

    Args:
        mu: strength of the proximal term; 0 is FedAvg.
        weighting: how the server weighs clients, see :class:`FedAvg`.

    Raises:
        ValueError: ``mu`` is negative.
    """

    @checked(mu=Bounds(0))
    def __init__(self, mu: float = 0.01, weighting: Literal["samples", "uniform"] = "samples") -> None:
        super().__init__(weighting)
        self.mu = mu
        self._client = ProximalTerm(mu)


class ProximalTerm(ClientRule):
    """Adds ``mu / 2 ||w - w^t||^2`` to the loss of every batch (equation 2)."""

    def __init__(self, mu: float) -> None:
        self.mu = mu
        self.needs = Needs(dense_gradients=mu > 0)

    def loss_term(self, work: LocalWork, batch: Any, batch_idx: int) -> Tensor | None:
        """The term, differentiable in the module's parameters; ``None`` for ``mu = 0``."""
        if self.mu == 0:
            return None
        # One flat vector is cheaper than a difference and a sum per parameter.
        offset = torch.cat([parameter.reshape(-1) for parameter in work.parameters]) - work.params
        return 0.5 * self.mu * torch.dot(offset, offset)
