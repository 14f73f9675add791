# SPDX-License-Identifier: Apache-2.0
"""A U-Net of segmentation-models-pytorch, trained as its examples do: lists of outputs, cosine annealing per step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import made_data
import segmentation_models_pytorch as smp
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from segmentation_models_pytorch.metrics import get_stats, iou_score
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import fl_lightning as fl  # +


class Segmentation(L.LightningModule):
    """Steps put their counts into lists, and hooks at the end of an epoch make numbers of them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        small = {"encoder_weights": None, "encoder_depth": 3, "decoder_channels": (32, 16, 8)}
        self.model = smp.create_model("Unet", "resnet18", in_channels=3, classes=classes, **small)
        self.register_buffer("std", torch.tensor(IMAGENET_DEFAULT_STD).view(1, 3, 1, 1))
        self.register_buffer("mean", torch.tensor(IMAGENET_DEFAULT_MEAN).view(1, 3, 1, 1))
        self.loss_fn = smp.losses.DiceLoss(smp.losses.MULTICLASS_MODE, from_logits=True)
        self.training_step_outputs: list[dict[str, Tensor]] = []
        self.validation_step_outputs: list[dict[str, Tensor]] = []
        self.test_step_outputs: list[dict[str, Tensor]] = []

    def forward(self, image: Tensor) -> Tensor:
        return self.model((image - self.mean) / self.std)

    def shared_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        image, mask = batch
        logits = self(image).contiguous()
        found = logits.softmax(dim=1).argmax(dim=1)
        counts = get_stats(found, mask.long(), mode="multiclass", num_classes=self.classes)
        return {"loss": self.loss_fn(logits, mask.long()), **dict(zip(("tp", "fp", "fn", "tn"), counts, strict=True))}

    def shared_epoch_end(self, outputs: list[dict[str, Tensor]], stage: str) -> None:
        counts = [torch.cat([output[name] for output in outputs]) for name in ("tp", "fp", "fn", "tn")]
        kinds = {"per_image_iou": "micro-imagewise", "dataset_iou": "micro"}
        self.log_dict({f"{stage}_{name}": iou_score(*counts, reduction=kind) for name, kind in kinds.items()})

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        output = self.shared_step(batch)
        self.training_step_outputs.append(output)
        return output

    def on_train_epoch_end(self) -> None:
        self.shared_epoch_end(self.training_step_outputs, "train")
        self.training_step_outputs.clear()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        output = self.shared_step(batch)
        self.validation_step_outputs.append(output)
        return output

    def on_validation_epoch_end(self) -> None:
        self.shared_epoch_end(self.validation_step_outputs, "valid")
        self.validation_step_outputs.clear()

    def test_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        output = self.shared_step(batch)
        self.test_step_outputs.append(output)
        return output

    def on_test_epoch_end(self) -> None:
        self.shared_epoch_end(self.test_step_outputs, "test")
        self.test_step_outputs.clear()

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 1}}


def main(folder: str | Path = "runs/segmentation", epochs: int = 2, resume: str | Path | None = None) -> L.Trainer:
    """Trains on made scenes, and tests."""
    L.seed_everything(0)
    scenes = [TensorDataset(*map(torch.from_numpy, made_data.scenes(count, seed=count))) for count in (32, 12, 10)]
    train, val, test = (DataLoader(data, batch_size=4, shuffle=data is scenes[0]) for data in scenes)
    model = Segmentation(classes=3)
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(fl.algorithms.FedAvg()),  # +
        max_epochs=epochs,
        accelerator="cpu",
        log_every_n_steps=1,
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder, save_top_k=-1)],
    )
    trainer.fit(
        model,
        # - train_dataloaders=train,
        # - val_dataloaders=val,
        fl.FederatedDataModule(train, fl.data.IID(3), val=val),  # +
        ckpt_path=resume,
    )
    trainer.validate(model, val)
    trainer.test(model, test)
    return trainer


if __name__ == "__main__":
    main()
