# SPDX-License-Identifier: Apache-2.0
"""How well a model ranks the samples of a client: AUROC over the classes that the client has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.utilities import dim_zero_cat


class HeldAUROC(Metric):
    """One-versus-rest AUROC, mean over the classes that the samples have.

    A class that a client lacks cannot be told from the others there, and does not count. A client with a single class
    has nothing to rank: its value is NaN, which a federated evaluation counts as undefined. With two classes out of two
    this is the AUROC of the binary task.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    scores: list[Tensor]
    labels: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds samples.

        Args:
            logits: ``[B, C]`` of the classes.
            labels: ``[B]`` class indices.
        """
        self.scores.append(logits.softmax(1))
        self.labels.append(labels)

    def compute(self) -> Tensor:
        """The mean; NaN if the samples are of one class."""
        scores, labels = dim_zero_cat(self.scores), dim_zero_cat(self.labels)
        held = sorted(set(labels.tolist()))
        if len(held) < 2:
            return torch.tensor(float("nan"))
        values: list[Any] = [binary_auroc(scores[:, label], (labels == label).long()) for label in held]
        return torch.stack(values).mean()
