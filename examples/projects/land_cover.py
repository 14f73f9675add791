# SPDX-License-Identifier: Apache-2.0
"""torchgeo's segmentation task on LoveDA: a U-Net of segmentation-models-pytorch, urban and rural clients."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import made_data
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torchgeo.datamodules import LoveDADataModule
from torchgeo.trainers import SemanticSegmentationTask

import fl_lightning as fl  # +


def main(folder: str | Path = "runs/land_cover", epochs: int = 2, resume: str | Path | None = None) -> L.Trainer:
    """Trains, validates, and predicts the test scenes, whose masks LoveDA keeps to itself."""
    L.seed_everything(0)
    root = made_data.land_cover(Path(folder) / "loveda", scenes=8)
    data = LoveDADataModule(root=root, batch_size=4, num_workers=1)
    data = fl.FederatedDataModule(data, fl.data.ByKey(lambda d: [f["image"].split("/")[-3] for f in d.files]))  # +
    task = SemanticSegmentationTask(model="unet", backbone="resnet18", num_classes=8, lr=1e-3, patience=1)
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(fl.algorithms.FedFV(), clients_per_round=2),  # +
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder, save_top_k=-1), EarlyStopping("val_loss"), LearningRateMonitor()],
    )
    trainer.fit(task, data, ckpt_path=resume)
    trainer.validate(task, data)
    trainer.predict(task, data)
    return trainer


if __name__ == "__main__":
    main()
