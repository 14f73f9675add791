# SPDX-License-Identifier: Apache-2.0
"""Two shops' and two cameras' pictures of the same ten things: model, data and method of the federation.

Simulation and Flower app use this file as it is.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import lightning as L
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

import fl_lightning as fl

SITES = ("amazon", "caltech10", "dslr", "webcam")
CLASSES, SIDE, BATCH = 10, 32, 16
STRATEGY = fl.FederatedStrategy(fl.algorithms.FedHEAL(tau=0.4), min_clients=2)  # of the simulation, server and sites


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut.extend([nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)])

    def forward(self, images: Tensor) -> Tensor:
        return relu(self.branch(images) + self.shortcut(images))


def residual(width: int) -> nn.Sequential:
    """ResNet-10 of FedHEAL's experiments, narrower."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2),
        Block(4 * width, 8 * width, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, CLASSES),
    )  # fmt: skip


class Model(L.LightningModule):
    """A small residual network with BatchNorm, trained with momentum."""

    def __init__(self, width: int = 16, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = residual(width)
        self.val_acc = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        mirrored = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(-1), images)
        return cross_entropy(self.net(mirrored), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.val_acc(self.net(images), labels)
        self.log("val_acc", self.val_acc)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.hparams["lr"], momentum=0.9, weight_decay=1e-4)


class Pictures(L.LightningDataModule):
    """The pictures of one site, or of several one after the other.

    Args:
        folders: per site, a folder ``<class>/*.jpg`` in the form of torchvision's ImageFolder.
    """

    def __init__(self, *folders: str | Path) -> None:
        super().__init__()
        self.folders = folders

    def train_dataloader(self) -> DataLoader:
        return DataLoader(ConcatDataset([halves(str(f))[0] for f in self.folders]), BATCH, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(ConcatDataset([halves(str(f))[1] for f in self.folders]), 64)


@cache
def halves(folder: str) -> tuple[Subset, Subset]:
    """Training and validation pictures: of ten in a row, sorted by class and name, eight are for training.

    A picture is ``[3, SIDE, SIDE]`` from -1 to 1.
    """

    def load(path: str) -> Tensor:
        with Image.open(path) as image:
            image.draft("RGB", (SIDE, SIDE))  # decodes JPEGs at a reduced scale, not below this size
            return pil_to_tensor(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))

    found = ImageFolder(folder, loader=load)
    images = torch.stack([found[place][0] for place in range(len(found))]).float() / 127.5 - 1
    pictures, trains = TensorDataset(images, torch.tensor(found.targets)), torch.arange(len(found)) % 10 <= 7
    train, val = (Subset(pictures, torch.nonzero(half).flatten().tolist()) for half in (trains, ~trains))
    return train, val


def simulated_data(root: str | Path) -> fl.FederatedDataModule:
    """All sites as clients of one process.

    Args:
        root: a folder with one folder per site.
    """
    folders = [Path(root) / site for site in SITES]
    owners = {
        stage: [site for site, folder in zip(SITES, folders, strict=True) for _ in halves(str(folder))[half]]
        for half, stage in enumerate(("train", "val"))
    }
    return fl.FederatedDataModule(Pictures(*folders), fl.data.ByKey(owners))


def initial_model() -> Model:
    """The same weights every time."""
    torch.manual_seed(0)
    return Model()


def digest(model: Model) -> str:
    """Equal for equal weights."""
    values = torch.cat([value.detach().cpu().double().flatten() for value in model.state_dict().values()])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
