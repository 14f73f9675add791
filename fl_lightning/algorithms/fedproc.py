# SPDX-License-Identifier: Apache-2.0
"""FedProc: Prototypical Contrastive Federated Learning on Non-IID data.

Xutong Mu, Yulong Shen, Ke Cheng, Xueli Geng, Jiaxuan Fu, Tao Zhang, Zhiwei Zhang. Future Generation Computer Systems
143, 2023. https://arxiv.org/abs/2109.12273
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

from torch import Tensor
from torch.nn.functional import normalize

from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.fedproto import ClassPrototypes
from fl_lightning.algorithms.records import Federation, LocalWork
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.storage.declared import server_state


class FedProc(FedAvg):
    """Local training moves from telling classes apart by their prototypes to the module's own loss (Algorithm 1).

    The module defines ``federated_features(batch)`` with class indices, see :mod:`fl_lightning.algorithms.features`.

    Args:
        rounds: round ``t`` weighs the contrastive loss by ``1 - t / (rounds - 1)`` and the module's by the rest; from
            there on the module's counts alone. ``None``: the rounds of the fit. A fit of another length warns.
        temperature: of the contrastive loss.
        num_classes: number of classes.
        weighting: how the server weighs clients' models, see :class:`FedAvg`.

    Raises:
        ValueError: ``rounds`` is below 2, or ``temperature`` or ``num_classes`` is not positive.
    """

    @checked(rounds=Bounds(2), temperature=Bounds(above=0), num_classes=Bounds(1))
    def __init__(
        self,
        rounds: int | None = None,
        temperature: float = 1.0,
        num_classes: int = 10,
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        super().__init__(weighting)
        self.rounds, self.temperature, self.num_classes = rounds, temperature, num_classes
        self._client = PrototypeContrast(rounds, temperature, num_classes)


class PrototypeContrast(ClassPrototypes):
    """``a L_con + (1 - a) L`` with ``L_con = -log(e^(cos(f, p_y)/T) / sum_c e^(cos(f, p_c)/T))`` and falling ``a``.

    The sum runs over the classes that have a prototype. Without any (the first round) the module's own loss counts in
    full: nothing would be left to train on.
    """

    total_rounds = server_state(int, sent="all")

    def __init__(self, rounds: int | None, temperature: float, num_classes: int) -> None:
        super().__init__(num_classes)
        self.rounds, self.temperature = rounds, temperature

    def begin_fit(self, federation: Federation) -> None:
        """Learns how many rounds there are; warns if ``rounds`` says otherwise."""
        super().begin_fit(federation)
        self.total_rounds = self.rounds or federation.rounds or self.total_rounds
        if self.rounds is None:
            return
        if federation.rounds not in (None, self.rounds):
            reached = 1 - self.contrast_share((federation.rounds or 1) - 1)
            warnings.warn(
                f"rounds of FedProc is {self.rounds} in a fit of {federation.rounds}: in its last round the module's "
                f"own loss weighs {reached:.2g}. Leave rounds out to have it weigh 1 there",
                stacklevel=2,
            )

    def contrast_share(self, when: int) -> float:
        """``a`` in round ``when``, if there are prototypes."""
        total_rounds = self.rounds or self.total_rounds
        if total_rounds is None:
            raise ValueError("rounds of FedProc must be given where the number of rounds is not known, found None")
        return max(0.0, 1.0 - when / max(total_rounds - 1, 1))

    def contrast_weight(self, when: int) -> float:
        """``a`` in round ``when``."""
        return self.contrast_share(when) if len(self.prototypes) else 0.0

    def shape_loss(self, work: LocalWork, loss: Tensor) -> Tensor:
        """``(1 - a) L``."""
        weight = 1.0 - self.contrast_weight(work.round)
        return loss if weight == 1 else weight * loss

    def loss_term(self, work: LocalWork, batch: Any, batch_idx: int) -> Tensor | None:
        """``a L_con``; samples whose class has no prototype count 0 in the mean. ``None`` if ``a`` is 0."""
        features, classes = self.collect(work, batch)
        received, weight = self.received(features), self.contrast_weight(work.round)
        if received is None or weight == 0:
            return None
        prototypes, known = received
        cosines = normalize(features, dim=1) @ normalize(prototypes, dim=1).T
        scores = (cosines / self.temperature).masked_fill(~known, float("-inf"))
        likelihood = scores.log_softmax(1).masked_fill(~known, 0.0)
        return -weight * (classes * likelihood).sum(1).mean()
