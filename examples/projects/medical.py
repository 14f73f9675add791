# SPDX-License-Identifier: Apache-2.0
"""Segmentation of volumes with MONAI: a 3D U-Net, cached transforms, DiceMetric as an attribute of the module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import made_data
import pytorch_lightning
import torch
from monai.data import CacheDataset, DataLoader, decollate_batch, list_data_collate
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.layers import Norm
from monai.networks.nets import UNet
from monai.transforms import (
    AsDiscrete,
    Compose,
    EnsureChannelFirstd,
    LoadImaged,
    RandCropByPosNegLabeld,
    ScaleIntensityRanged,
)
from monai.utils import set_determinism
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

import fl_lightning as fl  # +

KEYS = ("image", "label")


def patients(folder: Path) -> list[dict[str, str]]:
    """The files of every patient."""
    images, labels = (sorted((folder / part).glob("*.nii.gz")) for part in ("imagesTr", "labelsTr"))
    return [dict(zip(KEYS, map(str, pair), strict=True)) for pair in zip(images, labels, strict=True)]


class Segmentation(pytorch_lightning.LightningModule):
    """A 3D U-Net that reads its own data and keeps MONAI's metric as an attribute."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.network = UNet(
            spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1,
            norm=Norm.BATCH,
        )  # fmt: skip
        self.loss = DiceLoss(to_onehot_y=True, softmax=True)
        self.discrete = AsDiscrete(argmax=True, to_onehot=2), AsDiscrete(to_onehot=2)
        self.dice = DiceMetric(include_background=False)
        self.losses: list[float] = []
        self.best = 0.0

    def setup(self, stage: str) -> None:
        """Caches what the deterministic transforms make; every third patient is for validation."""
        set_determinism(seed=0)
        fixed = [
            LoadImaged(KEYS),
            EnsureChannelFirstd(KEYS),
            ScaleIntensityRanged("image", a_min=-57, a_max=164, b_min=0.0, b_max=1.0, clip=True),
        ]
        crops = RandCropByPosNegLabeld(KEYS, label_key="label", spatial_size=(16, 16, 16), num_samples=2)
        found = patients(self.folder)
        train, val = [files for place, files in enumerate(found) if place % 3], found[::3]
        self.train_set = CacheDataset(train, Compose([*fixed, crops]), progress=False)
        self.val_set = CacheDataset(val, Compose(fixed), progress=False)

    def train_dataloader(self) -> DataLoader:
        """Random crops of two patients a batch."""
        return DataLoader(self.train_set, batch_size=2, shuffle=True, collate_fn=list_data_collate)

    def val_dataloader(self) -> DataLoader:
        """One patient a batch."""
        return DataLoader(self.val_set, batch_size=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The Dice loss of a batch of crops."""
        loss = self.loss(self.network(batch["image"]), batch["label"])
        self.log("train_loss", loss.item(), on_epoch=True, on_step=False, batch_size=len(batch["image"]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Gathers in the metric and in a list."""
        scores = sliding_window_inference(batch["image"], (16, 16, 16), 4, self.network)
        self.losses.append(self.loss(scores, batch["label"]).item())
        found, truth = self.discrete
        self.dice([found(x) for x in decollate_batch(scores)], [truth(x) for x in decollate_batch(batch["label"])])

    def on_validation_epoch_end(self) -> None:
        """Computes over all patients, and remembers the best round."""
        dice = self.dice.aggregate().item()
        self.log_dict({"val_dice": dice, "val_loss": sum(self.losses) / len(self.losses)})
        self.best = max(self.best, dice)
        self.dice.reset()
        self.losses.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), 1e-3)


def hospital(data: CacheDataset) -> list[str]:
    """Whose patients they are: the names of the files begin with it."""
    return [os.path.basename(files["image"]).split("_")[0] for files in data.data]


def main(
    folder: str | Path = "runs/medical", epochs: int = 2, resume: str | Path | None = None
) -> pytorch_lightning.Trainer:
    """Trains on the patients of three hospitals."""
    pytorch_lightning.seed_everything(0)
    net = Segmentation(made_data.volumes(Path(folder) / "data"))
    trainer = pytorch_lightning.Trainer(
        strategy=fl.FederatedStrategy(fl.algorithms.FedLF(), partition=fl.data.ByKey(hospital)),  # +
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder, save_top_k=-1)],
        num_sanity_val_steps=1,
    )
    trainer.fit(net, ckpt_path=resume)
    trainer.validate(net)
    return trainer


if __name__ == "__main__":
    main()
