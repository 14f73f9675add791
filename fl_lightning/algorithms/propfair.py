# SPDX-License-Identifier: Apache-2.0
"""PropFair: Proportional Fairness in Federated Learning.

Guojun Zhang, Saber Malekmohammadi, Xi Chen, Yaoliang Yu. TMLR 2023. https://arxiv.org/abs/2202.01666
https://github.com/huawei-noah/Federated-Learning/tree/main/FairFL
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.records import LocalWork
from fl_lightning.arguments import Bounds, checked


class PropFair(FedAvg):
    """FedAvg on ``-log(1 - F_i / M)``, so that relative gains of the clients' utilities ``M - F_i`` count.

    The gradient of a batch is that of its loss divided by ``M`` minus the loss: a client counts the more the larger its
    loss is.

    Args:
        base: the utility of a loss of 0, the paper's ``M``. It should be above the losses that training ends with.
        epsilon: utilities below count as too small for the logarithm.
        huber: what takes its place there: a line with the logarithm's slope at the bound, ``1 / epsilon``, or, as in
            the authors' scripts, one with slope ``1 / M``.
        weighting: how the server weighs clients.

    Raises:
        ValueError: ``base`` is not positive, or ``epsilon`` is not between 0 and ``base``.
    """

    @checked(base=Bounds(above=0), epsilon=Bounds(above=0))
    def __init__(
        self,
        base: float = 2.0,
        epsilon: float = 0.2,
        huber: bool = False,
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        super().__init__(weighting)
        if epsilon >= base:
            raise ValueError(f"epsilon of PropFair must be below base, {base}, found {epsilon}")
        self.base, self.epsilon, self.huber = base, epsilon, huber
        self._client = LogUtility(base, epsilon, huber)


class LogUtility(ClientRule):
    """Takes ``-log(1 - loss / base)`` for the loss of a batch."""

    def __init__(self, base: float, epsilon: float, huber: bool) -> None:
        self.base, self.epsilon, self.huber = base, epsilon, huber

    def shape_loss(self, work: LocalWork, loss: Tensor) -> Tensor:
        """``-log(1 - loss / base)`` where ``base - loss`` is at least ``epsilon``, and a line elsewhere."""
        low = self.base - loss < self.epsilon
        inside = torch.where(low, 0.0, loss)  # no gradient comes from a logarithm that is not taken
        return torch.where(low, loss / (self.epsilon if self.huber else self.base), -torch.log1p(-inside / self.base))
