# SPDX-License-Identifier: Apache-2.0
"""A Cox model with the loss and the concordance index of torchsurv; one hospital has no events."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import made_data
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchsurv.loss.cox import neg_partial_log_likelihood
from torchsurv.metrics.cindex import ConcordanceIndex

import fl_lightning as fl  # +


class Cox(L.LightningModule):
    """The concordance index compares patients with each other, so validation gathers them first."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.concordance = ConcordanceIndex()
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, event, time = batch
        loss = neg_partial_log_likelihood(self.network(x).squeeze(1), event, time)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, event, time = batch
        self.seen.append((self.network(x).squeeze(1), event, time))

    def on_validation_epoch_end(self) -> None:
        risk, event, time = (torch.cat(part) for part in zip(*self.seen, strict=True))
        self.seen.clear()
        self.log("val_concordance", self.concordance(risk, event, time))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def main(folder: str | Path = "runs/survival", epochs: int = 4, resume: str | Path | None = None) -> L.Trainer:
    """Trains on the patients of four hospitals, and validates."""
    L.seed_everything(0)
    patients, hospitals = made_data.patients()
    halves = made_data.halves(len(hospitals))
    train, val = (TensorDataset(*(torch.from_numpy(part[half]) for part in patients)) for half in halves)
    train.hospitals, val.hospitals = (hospitals[half] for half in halves)
    train, val = DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=64)
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(partition=fl.data.ByKey("hospitals")),  # +
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder, save_top_k=-1)],
    )
    model = Cox(features=6)
    trainer.fit(model, train, val, ckpt_path=resume)
    trainer.validate(model, val)
    return trainer


if __name__ == "__main__":
    main()
