# SPDX-License-Identifier: Apache-2.0
"""A network of timm with timm's augmentation, optimizer, losses and cosine schedule, which is none of torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import made_data
import timm
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from timm.data import Mixup, create_transform, resolve_model_data_config
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from torchvision.datasets import ImageFolder

import fl_lightning as fl  # +


class TimmClassifier(L.LightningModule):
    """timm's schedule has no part in torch's, so the module steps it itself."""

    def __init__(self, name: str, num_classes: int, epochs: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = timm.create_model(name, num_classes=num_classes, drop_rate=0.1)
        self.mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=num_classes)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.soft, self.hard = SoftTargetCrossEntropy(), nn.CrossEntropyLoss()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = self.mixup(*batch)
        loss = self.soft(self.model(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self.model(x)
        self.accuracy(logits, y)
        self.log("val_loss", self.hard(logits, y))
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = create_optimizer_v2(self.model, opt="adamw", lr=1e-3, weight_decay=0.05)
        schedule = CosineLRScheduler(optimizer, self.hparams.epochs, lr_min=1e-5, warmup_t=1, warmup_lr_init=1e-4)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler: CosineLRScheduler, metric: float | None) -> None:
        scheduler.step(epoch=self.current_epoch + 1)


def main(folder: str | Path = "runs/timm_classifier", epochs: int = 2, resume: str | Path | None = None) -> L.Trainer:
    """Trains on folders of images."""
    L.seed_everything(0)
    model = TimmClassifier("test_resnet.r160_in1k", num_classes=3, epochs=epochs)
    config = {**resolve_model_data_config(model.model), "input_size": (3, 48, 48)}
    root = made_data.image_folders(Path(folder) / "images")
    data = ImageFolder(root / "train", create_transform(**config, is_training=True, auto_augment="rand-m5-n2"))
    train = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    val = DataLoader(ImageFolder(root / "val", create_transform(**config)), batch_size=16)
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(fl.algorithms.FedFV()),  # +
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder, save_top_k=-1)],
    )
    trainer.fit(
        model,
        # - train_dataloaders=train,
        # - val_dataloaders=val,
        fl.FederatedDataModule(train, fl.data.Dirichlet(num_clients=3, alpha=1.0), val=val),  # +
        ckpt_path=resume,
    )
    trainer.validate(model, val)
    return trainer


if __name__ == "__main__":
    main()
