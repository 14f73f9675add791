# SPDX-License-Identifier: Apache-2.0
"""MNIST in the form of lightning-hydra-template: parts from a configuration, metric objects in every stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import made_data
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichModelSummary
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, random_split
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

import fl_lightning as fl  # +


class DigitModule(L.LightningModule):
    """A module as a configuration instantiates it; ``compile`` compiles the network when the fit is set up."""

    def __init__(self, net: nn.Module, optimizer: Callable, scheduler: Callable | None, compile: bool) -> None:  # noqa: A002
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net, self.criterion = net, nn.CrossEntropyLoss()
        self.train_acc, self.val_acc, self.test_acc = (MulticlassAccuracy(10, average="micro") for _ in range(3))
        self.train_loss, self.val_loss, self.test_loss = (MeanMetric() for _ in range(3))
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.flatten(start_dim=1))

    def setup(self, stage: str) -> None:
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def on_train_start(self) -> None:
        for metric in (self.val_loss, self.val_acc, self.val_acc_best):  # the sanity check has filled them
            metric.reset()

    def step(self, batch: list[Tensor], stage: str) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = self.criterion(logits, y)
        mean, accuracy = getattr(self, f"{stage}_loss"), getattr(self, f"{stage}_acc")
        mean(loss)
        accuracy(logits.argmax(dim=1), y)
        self.log(f"{stage}/loss", mean, on_step=False, on_epoch=True, prog_bar=True)
        self.log(f"{stage}/acc", accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(batch, "val")

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(batch, "test")

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is None:
            return {"optimizer": optimizer}
        scheduler = {"scheduler": self.hparams.scheduler(optimizer=optimizer), "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": {**scheduler, "interval": "epoch", "frequency": 1}}


class DigitData(L.LightningDataModule):
    """MNIST's two parts together, divided anew with a seed."""

    def __init__(self, folder: Path, lengths: tuple[int, int, int], batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
        self.train: Dataset | None = None

    def prepare_data(self) -> None:
        made_data.digits(self.hparams.folder)

    def setup(self, stage: str | None = None) -> None:
        if self.train is None:
            parts = [MNIST(self.hparams.folder, train=train, transform=self.transform) for train in (True, False)]
            seeded = torch.Generator().manual_seed(42)
            self.train, self.val, self.test = random_split(ConcatDataset(parts), self.hparams.lengths, seeded)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.hparams.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self.hparams.batch_size)


CONFIG = """
net:
  _target_: torchvision.ops.MLP
  in_channels: 784
  hidden_channels: [64, 32, 10]
  norm_layer: {_target_: hydra.utils.get_class, path: torch.nn.BatchNorm1d}
optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.001, weight_decay: 0.0}
scheduler:
  _target_: torch.optim.lr_scheduler.ReduceLROnPlateau
  _partial_: true
  mode: min
  factor: 0.1
  patience: 10
compile: false
"""


def main(folder: str | Path = "runs/hydra_template", epochs: int = 2, resume: str | Path | None = None) -> L.Trainer:
    """Trains a small dense network, and tests the model with the best accuracy."""
    L.seed_everything(0)
    module = DigitModule(**instantiate(OmegaConf.create(CONFIG)))
    data = DigitData(Path(folder) / "data", lengths=(320, 80, 80), batch_size=32)
    data = fl.FederatedDataModule(data, fl.data.Dirichlet(num_clients=4, alpha=0.5))  # +
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(fl.algorithms.FedLF()),  # +
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(folder),
        callbacks=[
            ModelCheckpoint(folder, monitor="val/acc", mode="max", save_top_k=-1),
            EarlyStopping("val/acc", patience=100, mode="max"),
            RichModelSummary(max_depth=-1),
        ],
    )
    trainer.fit(module, data, ckpt_path=resume, weights_only=False)  # the module's hyperparameters are functions
    trainer.test(module, data, ckpt_path="best", weights_only=False)
    return trainer


if __name__ == "__main__":
    main()
