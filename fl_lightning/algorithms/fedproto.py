# SPDX-License-Identifier: Apache-2.0
"""FedProto: Federated Prototype Learning across Heterogeneous Clients.

Yue Tan, Guodong Long, Lu Liu, Tianyi Zhou, Qinghua Lu, Jing Jiang, Chengqi Zhang. AAAI 2022.
https://arxiv.org/abs/2105.00243
"""

from __future__ import annotations

from math import inf
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.weighting import reported, require_parts
from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.features import class_labels, own_features
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.records import ClientReport, Federation, LocalWork, Needs
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.declared import server_state


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


class ClassPrototypes(ClientRule):
    """Clients average their features per class in their last pass, and the server averages those per class.

    Features are taken before the optimizer's step on their batch. The server's mean counts every client that holds the
    class alike; a class that no client of the round holds keeps the prototype that it had, if any. Negative class
    indices mark samples without a class. ``prototypes [C, d]`` are in double precision, and ``known [C]`` says which
    classes have one; both are empty before the first round has ended.
    """

    needs = Needs(features=True)
    reads = "sums"

    prototypes = server_state(torch.zeros(0, 0), sent="all")
    known = server_state(torch.zeros(0, dtype=torch.bool), sent="all")

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self._received: tuple[Tensor, Tensor] | None = None
        self._collected: tuple[Tensor, Tensor, Tensor] | None = None

    def begin_fit(self, federation: Federation) -> None:
        """Checks that restored prototypes are of these classes."""
        if len(self.known) not in (0, self.num_classes):
            raise ValueError(f"num_classes must be that of the checkpoint, {len(self.known)}, found {self.num_classes}")

    def begin_client(self, work: LocalWork) -> None:
        """The client receives the prototypes."""
        self._received = self._collected = None

    def begin_batch(self, work: LocalWork, batch: Any, batch_idx: int) -> None:
        """Every pass collects anew, so that the last one is left."""
        if batch_idx == 0:
            self._collected = None

    def received(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """The prototypes ``[C, d]`` and which are known ``[C]``, where and as features are; ``None`` without any."""
        if len(self.known) == 0:
            return None
        if self.prototypes.shape[1] != like.shape[1]:
            raise ValueError(
                f"features must keep their width, {self.prototypes.shape[1]} in earlier rounds, found {like.shape[1]}"
            )
        if self._received is None:
            self._received = self.prototypes.to(like.device, like.dtype), self.known.to(like.device)
        return self._received

    def collect(self, work: LocalWork, batch: Any) -> tuple[Tensor, Tensor]:
        """Features ``[B, d]`` of the batch, and its classes ``[B, C]`` as ones and zeros; adds them to the client's."""
        features = own_features(work, batch)
        labels = class_labels(features, work.module)
        values = features.values
        classes = (labels[:, None] == torch.arange(self.num_classes, device=values.device)).to(values.dtype)
        # Products of matrices, because scattered sums come in another order on every run of an accelerator.
        sums, counts = classes.T @ values.detach(), classes.sum(0)
        largest = labels.max() if len(labels) else labels.new_tensor(-1)
        if self._collected is not None:
            sums, counts = self._collected[0] + sums, self._collected[1] + counts
            largest = torch.maximum(self._collected[2], largest)
        self._collected = sums, counts, largest
        return values, classes

    def end_client(self, work: LocalWork) -> ClientReport:
        """Sends the client's prototypes ``[C, d]`` and how many samples each comes from, ``[C]``."""
        if self._collected is None:
            raise ValueError(f"training_step must return losses, client {work.client_id} found none to add features to")
        sums, counts, largest = self._collected
        if int(largest) >= self.num_classes:
            raise ValueError(f"class indices must be below num_classes={self.num_classes}, found {int(largest)}")
        prototypes = sums / counts.clamp(min=1)[:, None]
        if not bool(torch.isfinite(prototypes).all()):
            raise ValueError(f"features must be finite, found NaN or infinity at client {work.client_id}")
        return ClientReport(extras={"prototypes": prototypes, "prototype_counts": counts})

    def commit(self, cohort: Cohort) -> None:
        """The server's prototype of a class becomes the mean of those of the clients that hold it."""
        method, classes = type(self).__name__, self.num_classes
        sent = reported(cohort, "prototypes", (classes, None), method)
        counts = reported(cohort, "prototype_counts", (classes,), method)
        require_parts(counts, inf, cohort, "prototype_counts", method)
        held = counts > 0
        means = (sent * held[:, :, None]).sum(0) / held.sum(0).clamp(min=1)[:, None]
        fresh = held.any(0)
        before = self.prototypes.to(means) if len(self.known) else torch.zeros_like(means)
        self.prototypes = torch.where(fresh[:, None], means, before)
        self.known = self.known.to(fresh.device) | fresh if len(self.known) else fresh


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
