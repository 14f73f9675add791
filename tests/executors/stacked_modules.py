# SPDX-License-Identifier: Apache-2.0
"""Modules that train in one pass for all clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from support import CLASSES, FEATURES, blobs, federated_blobs, fresh, quiet_trainer
from torch import nn
from torch.utils.data import TensorDataset

import fl_lightning as fl


class Blob(L.LightningModule):
    """A network on blobs; ``seen`` is for subclasses that count."""

    data = staticmethod(federated_blobs)

    def __init__(
        self, net: Callable[[], nn.Module] | None = None, optimizer: Callable[..., Any] | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        hidden = nn.Linear(FEATURES, 8, bias=bias)
        self.net = nn.Sequential(hidden, nn.ReLU(), nn.Linear(8, CLASSES, bias=bias)) if net is None else net()
        self.make = optimizer
        self.seen: list[float] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        if self.make is None:
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return self.make(self.parameters())


class Image(Blob):
    """Convolutions, GroupNorm and pooling."""

    def __init__(self) -> None:
        super().__init__(
            lambda: nn.Sequential(
                nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.0), nn.Flatten(),
                nn.Linear(36, CLASSES),
            )
        )  # fmt: skip

    @staticmethod
    def data() -> fl.FederatedDataModule:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(130, 1, 8, 8, generator=generator)
        labels = torch.randint(0, CLASSES, (130,), generator=generator)
        parts = list(torch.arange(130).split([20, 20, 33, 20, 37]))
        return fl.FederatedDataModule(TensorDataset(images, labels), parts, batch_size=10)


class Gap(Blob):
    """A layer that no loss depends on, under weight decay: its weights must stay."""

    def __init__(self) -> None:
        super().__init__(optimizer=partial(torch.optim.SGD, lr=0.1, weight_decay=0.5, momentum=0.9))
        self.unused = nn.Linear(3, 3)


class SometimesGap(Gap):
    """A layer that only the first batch of a pass depends on."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.unused.weight.square().sum() if batch_idx == 0 else {"loss": loss, "extra": 1}


class Tied(Blob):
    """One weight in two places, a frozen layer, a parameter on the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.a, self.b = nn.Linear(FEATURES, FEATURES, bias=False), nn.Linear(FEATURES, FEATURES)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.scale * self.net(self.b(torch.tanh(self.a(self.frozen(x))))), y)


class Groups(Blob):
    """Two parameter groups, one of which misses a bias."""

    def configure_optimizers(self):
        first, last = self.net[0], self.net[2]
        groups = [{"params": [first.weight], "lr": 0.05}, {"params": list(last.parameters()), "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=0.02)


class Running(Blob):
    """A buffer that is replaced, one that changes in place, one that stays, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("weight", torch.linspace(0.5, 1.5, CLASSES))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.count += 1
        self.cache.add_(x.mean())
        return F.cross_entropy(self.net(x - self.mean), y, weight=self.weight)


class Penalty(Blob):
    """Logs in several ways, and a loss with a second term."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        penalty = sum(p.square().sum() for p in self.parameters())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"penalty": penalty, "place": float(batch_idx)})
        self.log("most", loss, reduce_fx="max", on_step=False, on_epoch=True, batch_size=3)
        return loss + 0.01 * penalty


class Words(Blob):
    """An embedding and attention over integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(20, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net[2](self.attend(self.embed(x)).mean(1)), y)

    @staticmethod
    def data() -> fl.FederatedDataModule:
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(0, 20, (90, 5), generator=generator)
        return fl.FederatedDataModule(
            TensorDataset(words, words[:, 0] % CLASSES), list(torch.arange(90).split(18)), batch_size=6
        )


class Double(Blob):
    """Double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    @staticmethod
    def data() -> fl.FederatedDataModule:
        x, y = blobs(100).tensors
        return fl.FederatedDataModule(TensorDataset(x.double(), y), list(torch.arange(100).split(25)), batch_size=10)


def _norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


class Norm(Blob):
    """BatchNorm."""

    def __init__(self) -> None:
        super().__init__(_norm)


class Regression(Blob):
    """Logistic regression."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(FEATURES, CLASSES))


MODULES: dict[str, type[Blob]] = {
    "logistic": Regression, "perceptron": Blob, "image": Image, "norm": Norm, "gap": Gap, "sometimes": SometimesGap,
    "tied": Tied, "groups": Groups, "running": Running, "penalty": Penalty, "words": Words, "double": Double,
}  # fmt: skip


class Rows(Logger):
    """Keeps what it is given, in order."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, {k: float(v) for k, v in metrics.items() if k != "fed/seconds"}))


def records(executor: fl.executors.Executor | None) -> list[tuple[int | None, dict[str, float]]]:
    """Everything that reaches a logger."""
    rows = Rows()
    strategy = fl.FederatedStrategy(executor=executor, seed=3)
    trainer = quiet_trainer(strategy, 2, logger=rows)
    trainer.fit(fresh(Penalty), federated_blobs())
    assert strategy.detour is None
    return rows.rows
