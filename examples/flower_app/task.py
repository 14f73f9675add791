# SPDX-License-Identifier: Apache-2.0
"""What is trained, on which data, and how, for the simulation and the Flower app. Put your own in its place."""

from __future__ import annotations

import functools
import hashlib

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import fl_lightning as fl

SITES = 4
# Of the simulation, the server and the clients alike.
STRATEGY = fl.FederatedStrategy(fl.algorithms.FedLF(), clients_per_round=3, local_epochs=2, min_clients=2, seed=0)


class Model(L.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        logits = self.net(inputs)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


@functools.cache
def dataset(site: int, stage: str) -> TensorDataset:
    """The data of one site: three classes, which look a little different from site to site."""
    generator = torch.Generator().manual_seed(10 * site + len(stage))
    labels = torch.randint(0, 3, (200 + 100 * site if stage == "train" else 150,), generator=generator)
    centres = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    shift = torch.randn(8, generator=torch.Generator().manual_seed(100 + site))
    noise = torch.randn(len(labels), 8, generator=generator)
    return TensorDataset(centres[labels] + site / 2 * shift + noise, labels)


class SiteData(L.LightningDataModule):
    """An ordinary LightningDataModule with the data of one site, which exist on the machine of that site alone."""

    def __init__(self, site: int) -> None:
        super().__init__()
        self.site = site

    def train_dataloader(self) -> DataLoader:
        return DataLoader(dataset(self.site, "train"), batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(dataset(self.site, "val"), batch_size=64)


class AllSites(L.LightningDataModule):
    """The sites' data one after the other, for a simulation."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(ConcatDataset([dataset(site, "train") for site in range(SITES)]), batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(ConcatDataset([dataset(site, "val") for site in range(SITES)]), batch_size=64)


def simulated_data() -> fl.FederatedDataModule:
    """All sites as clients of one process."""
    owners = {
        stage: [site for site in range(SITES) for _ in range(len(dataset(site, stage)))] for stage in ("train", "val")
    }
    return fl.FederatedDataModule(AllSites(), fl.data.ByKey(owners))


def initial_model() -> Model:
    """The same weights every time."""
    torch.manual_seed(0)
    return Model()


def digest(model: Model) -> str:
    """Equal for equal weights."""
    values = torch.cat([value.detach().cpu().double().flatten() for value in model.state_dict().values()])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
