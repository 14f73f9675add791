# SPDX-License-Identifier: Apache-2.0
"""A two-tower recommender of torch-rechub with sparse gradients: SparseAdam for tables, Adam for towers, by hand."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import made_data
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch_rechub.basic.features import SequenceFeature, SparseFeature
from torch_rechub.basic.initializers import RandomNormal
from torch_rechub.models.matching import DSSM
from torch_rechub.utils.data import TorchDataset
from torchmetrics.classification import BinaryAUROC

import fl_lightning as fl  # +


class TwoTowers(L.LightningModule):
    """Lightning leaves several optimizers to the module; a batch is a dictionary of features, and labels."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        table = {"embed_dim": 8, "initializer": RandomNormal(0, 0.3)}
        user = [
            SparseFeature("user", users, **table),
            SequenceFeature("history", items, pooling="mean", shared_with="item", padding_idx=0, **table),
        ]
        item = [SparseFeature("item", items, padding_idx=0, **table), SparseFeature("kind", 4, **table)]
        tower = {"dims": [32, 16], "activation": "relu"}
        self.towers = DSSM(user, item, user_params=tower, item_params=tower)
        for embedding in self.towers.embedding.embed_dict.values():
            embedding.sparse = True
        self.auroc = BinaryAUROC()

    def training_step(self, batch: tuple[dict[str, Tensor], Tensor], batch_idx: int) -> None:
        features, bought = batch
        loss = F.binary_cross_entropy(self.towers(features), bought)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("train_loss", loss, on_step=False, on_epoch=True)

    def validation_step(self, batch: tuple[dict[str, Tensor], Tensor], batch_idx: int) -> None:
        features, bought = batch
        self.auroc(self.towers(features), bought.long())
        self.log("val_auroc", self.auroc)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        tables = list(self.towers.embedding.parameters())
        dense = [*self.towers.user_mlp.parameters(), *self.towers.item_mlp.parameters()]
        return [torch.optim.SparseAdam(tables, lr=3e-2), torch.optim.Adam(dense, lr=3e-3)]


def main(folder: str | Path = "runs/recommender", epochs: int = 3, resume: str | Path | None = None) -> L.Trainer:
    """Trains on what was bought in five shops, and validates."""
    L.seed_everything(0)
    features, bought = made_data.purchases()
    halves = made_data.halves(len(bought))
    train, val = (TorchDataset({name: f[half] for name, f in features.items()}, bought[half]) for half in halves)
    train, val = DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=128)
    shops = fl.data.ByKey(lambda data: data.x["shop"])  # +
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(partition=shops),  # +
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder, save_top_k=-1)],
    )
    model = TwoTowers(users=120, items=60)
    trainer.fit(model, train, val, ckpt_path=resume)
    trainer.validate(model, val)
    return trainer


if __name__ == "__main__":
    main()
