# SPDX-License-Identifier: Apache-2.0
"""FedProto: Federated Prototype Learning across Heterogeneous Clients.

Yue Tan, Guodong Long, Lu Liu, Tianyi Zhou, Qinghua Lu, Jing Jiang, Chengqi Zhang. AAAI 2022.
https://arxiv.org/abs/2105.00243
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from fl_lightning.algorithms._shared.prototypes import ClassPrototypes
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.records import LocalWork
from fl_lightning.arguments import Bounds, checked


class FedProto(FedAvg):
    """Features are drawn to the mean features that all clients have of their class (Algorithm 1), and models averaged.

    The module defines ``federated_features(batch)`` with class indices, see :mod:`fl_lightning.algorithms.features`.

    Args:
        lam: weight of the distance to the prototypes, the paper's lambda; 0 is FedAvg, up to what dropout draws in the
            pass for the features.
        num_classes: number of classes.
        weighting: how the server weighs clients' models, see :class:`FedAvg`.

    Raises:
        ValueError: ``lam`` is negative, or ``num_classes`` is not positive.
    """

    @checked(lam=Bounds(0), num_classes=Bounds(1))
    def __init__(
        self, lam: float = 1.0, num_classes: int = 10, weighting: Literal["samples", "uniform"] = "samples"
    ) -> None:
        super().__init__(weighting)
        self.lam, self.num_classes = lam, num_classes
        self._client = PrototypeDistance(lam, num_classes)


class PrototypeDistance(ClassPrototypes):
    """Adds ``lambda * mean (f(x) - prototype of x's class)^2`` over the batch and the features (equation 7)."""

    def __init__(self, lam: float, num_classes: int) -> None:
        super().__init__(num_classes)
        self.lam = lam

    def loss_term(self, work: LocalWork, batch: Any, batch_idx: int) -> Tensor | None:
        """The term; samples whose class has no prototype count 0 in the mean. ``None`` before there are any."""
        features, classes = self.collect(work, batch)
        received = self.received(features)
        if self.lam == 0 or received is None:
            return None
        prototypes, known = received
        matched = classes * known
        offsets = matched.sum(1, keepdim=True) * features - matched @ prototypes
        return self.lam * offsets.square().mean()
