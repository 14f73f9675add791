# SPDX-License-Identifier: Apache-2.0
"""The shapes as a Lightning project has them."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import fl_lightning as fl
from benchmarks._rounds.shape import Shape


class Classifier(L.LightningModule):
    """The network as a Lightning project has it.

    Args:
        shape: the network and its learning rate.
        logs: call ``self.log`` once per step.
    """

    def __init__(self, shape: Shape, logs: bool = False) -> None:
        super().__init__()
        self.net, self.lr, self.logs = shape.initial(), shape.lr, logs

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy; logged once per step if asked for."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        if self.logs:
            self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def federated(shape: Shape, x: Tensor, y: Tensor) -> fl.FederatedDataModule:
    """Client ``i`` has the ``i``-th block of samples."""
    parts = list(torch.arange(len(y)).split(shape.samples))
    return fl.FederatedDataModule(TensorDataset(x, y), parts, batch_size=shape.batch)
