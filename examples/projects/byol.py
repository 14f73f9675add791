# SPDX-License-Identifier: Apache-2.0
"""BYOL with the parts of lightly: a teacher of frozen parameters that follows the trained ones in ``training_step``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import made_data
import pytorch_lightning as pl
import torch
import torchvision
from lightly.data import LightlyDataset
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import update_momentum
from lightly.transforms.byol_transform import BYOLTransform, BYOLView1Transform, BYOLView2Transform
from lightly.utils.scheduler import cosine_schedule
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn

import fl_lightning as fl  # +


class Byol(pl.LightningModule):
    """A student that predicts what its teacher, a moving average of it, makes of another view of the same picture."""

    def __init__(self) -> None:
        super().__init__()
        layers = torchvision.models.resnet18(num_classes=1)
        layers.fc = nn.Identity()
        self.student = nn.Sequential(layers, BYOLProjectionHead(512, 512, 128))
        self.predictor = BYOLPredictionHead(128, 512, 128)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.distance = NegativeCosineSimilarity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Moves the teacher, then compares both views both ways."""
        update_momentum(self.student, self.teacher, m=cosine_schedule(self.current_epoch, 10, 0.996, 1))
        views = batch[0]
        told = [self.predictor(self.student(view)) for view in views]
        with torch.no_grad():
            known = [self.teacher(view) for view in views]
        return (self.distance(told[0], known[1]) + self.distance(told[1], known[0])) / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of the student."""
        return torch.optim.SGD([*self.student.parameters(), *self.predictor.parameters()], lr=0.06)


def main(folder: str | Path = "runs/byol", epochs: int = 2, resume: str | Path | None = None) -> pl.Trainer:
    """Trains on the pictures of three cameras."""
    pl.seed_everything(0)
    transform = BYOLTransform(
        view_1_transform=BYOLView1Transform(input_size=32, gaussian_blur=0.0),
        view_2_transform=BYOLView2Transform(input_size=32, gaussian_blur=0.0),
    )
    dataset = LightlyDataset(str(made_data.pictures(Path(folder) / "data")), transform=transform)
    dataloader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, drop_last=True)
    clients = fl.data.ByKey(lambda data: [name.split("/")[0] for name in data.get_filenames()])  # +
    trainer = pl.Trainer(
        strategy=fl.FederatedStrategy(partition=clients),  # +
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        callbacks=[ModelCheckpoint(folder, save_top_k=-1)],
    )
    trainer.fit(model=Byol(), train_dataloaders=dataloader, ckpt_path=resume)
    return trainer


if __name__ == "__main__":
    main()
