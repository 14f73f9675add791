# SPDX-License-Identifier: Apache-2.0
"""Small projects that the tests federate: ordinary modules and data, nothing federated about them."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fl_lightning as fl

FEATURES, CLASSES = 12, 4


def blobs(samples: int, seed: int = 0) -> TensorDataset:
    """Linearly separable-ish classes, the same ones for every seed."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    return TensorDataset(centres[labels] + 0.8 * torch.randn(samples, FEATURES, generator=generator), labels)


class Tally:
    """Counts, also where plain attributes of a module come back as they were: it changes inside."""

    def __init__(self) -> None:
        self.count = 0

    def __iadd__(self, more: int) -> Tally:
        self.count += more
        return self


class Blobs(L.LightningDataModule):
    """Train, validation and test loaders as anybody writes them."""

    def __init__(self, train: int = 240, batch_size: int = 10) -> None:
        super().__init__()
        self.train, self.batch_size = train, batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(blobs(self.train, 0), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(blobs(80, 1), batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(blobs(80, 2), batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(blobs(20, 3).tensors[0]), batch_size=self.batch_size)


class Classifier(L.LightningModule):
    """A plain classifier; options add what different projects add."""

    def __init__(
        self, lr: float = 0.1, momentum: float = 0.0, log: bool = False, dropout: float = 0.0, norm: bool = False,
        optimizer: str = "SGD",
    ) -> None:  # fmt: skip
        super().__init__()
        self.save_hyperparameters()
        hidden = 8
        layers: list[nn.Module] = [nn.Linear(FEATURES, hidden)]
        if norm:
            layers.append(nn.BatchNorm1d(hidden))
        layers.append(nn.ReLU())
        if dropout:
            layers.append(nn.Dropout(dropout))
        self.net = nn.Sequential(*layers, nn.Linear(hidden, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def federated_features(self, batch) -> tuple[Tensor, Tensor]:
        x, y = batch
        return self.net[:-1](x), y

    def training_step(self, batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        if self.hparams.log:
            self.log("train_loss", loss)
        return loss

    def federated_accuracy(self, batch, batch_idx: int) -> Tensor:
        x, y = batch
        return (self(x).argmax(1) == y).float().mean()

    def federated_groups(self, batch) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self(x)
        return logits[:, 0] - logits[:, 1], (y == 0).long(), (x[:, 0] > 0).long()

    def _evaluate(self, batch, name: str) -> None:
        x, y = batch
        logits = self(x)
        self.log(f"{name}_loss", F.cross_entropy(logits, y))
        self.log(f"{name}_acc", (logits.argmax(1) == y).float().mean())

    def validation_step(self, batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        if self.hparams.optimizer == "Adam":
            return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=self.hparams.momentum)


def federated_blobs(clients: int = 6, alpha: float = 1.0, **options) -> fl.FederatedDataModule:
    """The blobs over a few unequal clients."""
    return fl.FederatedDataModule(Blobs(**options), fl.data.Dirichlet(clients, alpha), seed=0)


def quiet_trainer(strategy: fl.FederatedStrategy, max_epochs: int = 3, **options) -> L.Trainer:
    """A trainer without bars, loggers and checkpoints unless asked for."""
    defaults = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "log_every_n_steps": 1,
    }  # fmt: skip
    return L.Trainer(max_epochs=max_epochs, strategy=strategy, **{**defaults, **options})


class AllHooks(L.Callback):
    """Watches optimizer steps, so that local training takes Lightning's own path through all hooks."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        pass


def on_path(lean: bool) -> dict[str, list[L.Callback]]:
    """Options of a trainer whose fits take the lean path, or the full one."""
    return {} if lean else {"callbacks": [AllHooks()]}


def fresh(module_class=Classifier, seed: int = 0, **options):
    """The same initial weights every time."""
    torch.manual_seed(seed)
    return module_class(**options)


def weights(module: nn.Module) -> Tensor:
    """All parameters and buffers in one vector."""
    return torch.cat([t.detach().double().flatten() for t in module.state_dict().values()])
