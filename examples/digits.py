# SPDX-License-Identifier: Apache-2.0
"""An existing Lightning project: hand-written digits, a small network. Nothing in this file is federated."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Digits(L.LightningDataModule):
    """The 1,797 images of 8 x 8 pixels that scikit-learn carries: 70 % to train, 30 % to validate and test."""

    def __init__(self, batch_size: int = 10) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str | None = None) -> None:
        """Loads and splits the images, the same way every time."""
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        held_out = len(x) * 3 // 10
        self.train = TensorDataset(x[order[held_out:]], y[order[held_out:]])
        self.held_out = TensorDataset(x[order[:held_out]], y[order[:held_out]])

    def train_dataloader(self) -> DataLoader:
        """Shuffled training batches."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Held-out images."""
        return DataLoader(self.held_out, batch_size=256)

    def test_dataloader(self) -> DataLoader:
        """The same held-out images: this project selects nothing on them."""
        return DataLoader(self.held_out, batch_size=256)


class DigitClassifier(L.LightningModule):
    """Two hidden layers, cross entropy, SGD."""

    def __init__(self, lr: float = 0.1, hidden: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of a batch."""
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Logs loss and accuracy."""
        x, y = batch
        logits = self.net(x)
        self.accuracy(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", self.accuracy)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Logs accuracy."""
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("test_acc", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])
