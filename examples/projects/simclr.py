# SPDX-License-Identifier: Apache-2.0
"""SimCLR with the parts of lightly: two views of each picture, and a contrastive loss over the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import made_data
import pytorch_lightning as pl
import torch
import torchvision
from lightly.data import LightlyDataset
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms.simclr_transform import SimCLRTransform
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn

import fl_lightning as fl  # +


class SimClr(pl.LightningModule):
    """Draws the two views of a picture together, and those of different pictures in the batch apart."""

    def __init__(self) -> None:
        super().__init__()
        layers = torchvision.models.resnet18(num_classes=1)
        layers.fc = nn.Identity()
        self.network = nn.Sequential(layers, SimCLRProjectionHead(512, 512, 128))
        self.contrast = NTXentLoss(temperature=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The contrastive loss of a batch of views."""
        loss = self.contrast(*map(self.network, batch[0]))
        self.log("contrast", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of the whole network."""
        return torch.optim.SGD(self.network.parameters(), lr=0.06)


def main(folder: str | Path = "runs/simclr", epochs: int = 2, resume: str | Path | None = None) -> pl.Trainer:
    """Trains on the pictures of three cameras."""
    pl.seed_everything(0)
    dataset = LightlyDataset(str(made_data.pictures(Path(folder) / "data")), transform=SimCLRTransform(input_size=32))
    dataloader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, drop_last=True)
    clients = fl.data.ByKey(lambda data: [name.split("/")[0] for name in data.get_filenames()])  # +
    trainer = pl.Trainer(
        strategy=fl.FederatedStrategy(partition=clients),  # +
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        callbacks=[ModelCheckpoint(folder, save_top_k=-1)],
    )
    trainer.fit(model=SimClr(), train_dataloaders=dataloader, ckpt_path=resume)
    return trainer


if __name__ == "__main__":
    main()
