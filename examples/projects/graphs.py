# SPDX-License-Identifier: Apache-2.0
"""PyTorch Geometric's graph isomorphism network on its LightningDataset: batches of graphs of all sizes."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import made_data
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GIN, MLP, global_add_pool
from torchmetrics.classification import MulticlassAccuracy

import fl_lightning as fl  # +


class GraphClassifier(L.LightningModule):
    """A GIN, the sum over a graph's nodes and an MLP; the accuracy of training is a metric object, too."""

    def __init__(self, num_features: int, num_classes: int, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.nodes = GIN(num_features, width, num_layers=3, dropout=0.5, jk="cat")
        self.head = MLP([width, width, num_classes], norm="batch_norm", dropout=0.5)
        self.train_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, data: Data) -> Tensor:
        return self.head(global_add_pool(self.nodes(data.x, data.edge_index), data.batch))

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        logits = self(data)
        self.train_accuracy(logits, data.y)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True, batch_size=data.num_graphs)
        return F.cross_entropy(logits, data.y)

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.val_accuracy(self(data), data.y)
        self.log("val_accuracy", self.val_accuracy, batch_size=data.num_graphs)

    def test_step(self, data: Data, batch_idx: int) -> None:
        self.test_accuracy(self(data), data.y)
        self.log("test_accuracy", self.test_accuracy, batch_size=data.num_graphs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(folder: str | Path = "runs/graphs", epochs: int = 2, resume: str | Path | None = None) -> L.Trainer:
    """Trains on rings and paths, and tests the model with the best accuracy."""
    L.seed_everything(0)
    graphs = [
        Data(x=torch.tensor(x), edge_index=torch.tensor(e), y=torch.tensor([y])) for x, e, y in made_data.graphs()
    ]
    data = LightningDataset(graphs[:96], graphs[96:128], graphs[128:], batch_size=16)
    model = GraphClassifier(num_features=4, num_classes=2)
    data = fl.FederatedDataModule(data, fl.data.IID(4))  # +
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(fl.algorithms.FedLF()),  # +
        max_epochs=epochs,
        accelerator="cpu",
        log_every_n_steps=5,
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder, monitor="val_accuracy", mode="max", save_top_k=-1)],
    )
    trainer.fit(model, data, ckpt_path=resume)
    trainer.test(model, data, ckpt_path="best")
    return trainer


if __name__ == "__main__":
    main()
