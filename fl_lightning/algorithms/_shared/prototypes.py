# SPDX-License-Identifier: Apache-2.0
"""What FedProc and FedProto share: class prototypes, the mean features of every class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.weighting import reported
from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.features import class_labels, own_features
from fl_lightning.algorithms.records import ClientReport, LocalWork, Needs, State
from fl_lightning.core.cohort import Cohort


class ClassPrototypes(ClientRule):
    """Clients average their features per class in their last pass, and the server averages those per class.

    Features are taken before the optimizer's step on their batch. The server's mean counts every client that holds the
    class alike; a class that no client of the round holds keeps the prototype that it had, if any. Negative class
    indices mark samples without a class.

    Args:
        num_classes: number of classes.

    Attributes:
        prototypes: ``[C, d]`` the server's prototypes in double precision; ``None`` before the first round has ended.
        known: ``[C]`` which classes have one.
    """

    needs = Needs(features=True)
    reads = "sums"
    column_state = ()

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.prototypes: Tensor | None = None
        self.known = torch.zeros(num_classes, dtype=torch.bool)
        self._received: tuple[Tensor, Tensor] | None = None
        self._collected: tuple[Tensor, Tensor, Tensor] | None = None

    def begin_client(self, work: LocalWork) -> None:
        """The client receives the prototypes."""
        self._received = self._collected = None

    def begin_batch(self, work: LocalWork, batch: Any, batch_idx: int) -> None:
        """Every pass collects anew, so that the last one is left."""
        if batch_idx == 0:
            self._collected = None

    def received(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """The prototypes ``[C, d]`` and which are known ``[C]``, where and as the features are; ``None`` without any.

        Raises:
            ValueError: the features have another width than the prototypes.
        """
        if self.prototypes is None:
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
        """Sends the client's prototypes ``[C, d]`` and how many samples each comes from, ``[C]``.

        Raises:
            ValueError: a class index is too large, or a prototype is not finite.
        """
        if self._collected is None:
            raise ValueError(f"training_step must return losses, client {work.client_id} found none to add features to")
        sums, counts, largest = self._collected
        if int(largest) >= self.num_classes:
            raise ValueError(f"class indices must be below num_classes={self.num_classes}, found {int(largest)}")
        prototypes = sums / counts.clamp(min=1)[:, None]
        if not bool(torch.isfinite(prototypes).all()):
            raise ValueError(f"features must be finite, found NaN or infinity at client {work.client_id}")
        return ClientReport(extras={"prototypes": prototypes, "prototype_counts": counts})

    def broadcast(self) -> State:
        """The server's prototypes."""
        return {} if self.prototypes is None else {"prototypes": self.prototypes, "known": self.known}

    def take_broadcast(self, state: State) -> None:
        """Takes the server's prototypes."""
        self.load_state_dict(state)

    def commit(self, cohort: Cohort) -> None:
        """The server's prototype of a class becomes the mean of those of the clients that hold it.

        Raises:
            ValueError: the cohort carries no prototypes, or some that are not finite.
        """
        method, classes = type(self).__name__, self.num_classes
        sent = reported(cohort, "prototypes", (classes, None), method)
        held = reported(cohort, "prototype_counts", (classes,), method, least=0) > 0
        means = (sent * held[:, :, None]).sum(0) / held.sum(0).clamp(min=1)[:, None]
        fresh = held.any(0)
        before = torch.zeros_like(means) if self.prototypes is None else self.prototypes.to(means)
        self.prototypes = torch.where(fresh[:, None], means, before)
        self.known = self.known.to(fresh.device) | fresh

    def reset(self) -> None:
        """Forgets the prototypes."""
        self.prototypes, self.known = None, torch.zeros(self.num_classes, dtype=torch.bool)

    def state_dict(self) -> State:
        """The server's prototypes."""
        return self.broadcast()

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises:
            ValueError: the state is of another number of classes.
        """
        self.reset()
        if "prototypes" in state:
            if len(state["known"]) != self.num_classes:
                raise ValueError(
                    f"num_classes must be that of the checkpoint, {len(state['known'])}, found {self.num_classes}"
                )
            self.prototypes, self.known = state["prototypes"].clone(), state["known"].clone()
