# SPDX-License-Identifier: Apache-2.0
"""Three clients with made data. A client waits in the middle of its training while a file tells it to."""

from __future__ import annotations

import os
import time
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fl_lightning as fl

STRATEGY = fl.FederatedStrategy(fl.algorithms.FedLF(), min_clients=2)
SIZES = (40, 25, 31)
FEATURES, CLASSES, BATCH = 6, 3, 8
GATE = "FL_LIGHTNING_TEST_GATE"
"""Names a folder: ``begun-<client>-<round>`` says that a client trains, ``hold-<client>-<round>`` makes it wait."""


def samples(client: int, offset: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(client + offset)
    inputs = torch.randn(SIZES[client], FEATURES, generator=generator) + 0.3 * client
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


class Data(L.LightningDataModule):
    """One client's samples."""

    def __init__(self, client: int) -> None:
        super().__init__()
        self.client = client

    def train_dataloader(self) -> DataLoader:
        return DataLoader(samples(self.client), BATCH, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(samples(self.client, 100), BATCH)


class Model(L.LightningModule):
    """A small network with BatchNorm and Dropout; its initial weights are the same everywhere."""

    def __init__(self, client: int | None = None) -> None:
        super().__init__()
        self.client = client
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, CLASSES)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1 and GATE in os.environ:
            place = f"{self.client}-{self.current_epoch}"
            (Path(os.environ[GATE]) / f"begun-{place}").touch()
            while (Path(os.environ[GATE]) / f"hold-{place}").exists():
                time.sleep(0.1)
        inputs, labels = batch
        return cross_entropy(self.net(inputs), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        self.log("val_loss", cross_entropy(self.net(inputs), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
