# SPDX-License-Identifier: Apache-2.0
"""Small projects that the tests federate: ordinary modules and data, nothing federated about them."""

from __future__ import annotations

import inspect
import io
from typing import Any, ClassVar, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import Precision
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
    """Counts, also where what a module keeps comes back as it was: the count lies elsewhere."""

    __slots__ = ()
    _counts: ClassVar[dict[int, int]] = {}

    def __init__(self) -> None:
        self._counts[id(self)] = 0

    @property
    def count(self) -> int:
        return self._counts[id(self)]

    def __iadd__(self, more: int) -> Tally:
        self._counts[id(self)] += more
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
        optimizer: str = "SGD", hidden: int = 8,
    ) -> None:  # fmt: skip
        super().__init__()
        self.save_hyperparameters()
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


class Adapted(Classifier):
    """Frozen but for two factors of LoRA, which have the names that PEFT gives them."""

    def __init__(self, rank: int = 2, **options: Any) -> None:
        super().__init__(**options)
        for parameter in self.requires_grad_(False).parameters():  # the same on all sides, whatever the seed
            parameter.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(0))
        layer = self.net[0]
        layer.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, rank, bias=False)})
        layer.lora_B = nn.ModuleDict({"default": nn.Linear(rank, layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        layer = self.net[0]
        return self.net[1:](layer(x) + layer.lora_B["default"](layer.lora_A["default"](x)))


class Manual(Classifier):
    """Steps by itself, and returns no loss."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


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


class OwnPrecision(Precision):
    """Does what Lightning's does; but it might not, so every step goes the way through Lightning's loop."""


def on_path(lean: bool) -> dict[str, list[Precision]]:
    """Options of a trainer whose fits take the lean path, or the full one."""
    return {} if lean else {"plugins": [OwnPrecision()]}


class Fit(NamedTuple):
    """What a fit leaves."""

    module: L.LightningModule
    strategy: fl.FederatedStrategy
    trainer: L.Trainer


def training_only(strategy: fl.FederatedStrategy, max_epochs: int = 3, **options) -> L.Trainer:
    """A quiet trainer that does not validate, which takes half the time."""
    return quiet_trainer(strategy, max_epochs, **{"limit_val_batches": 0, **options})


_STRATEGY = frozenset(inspect.signature(fl.FederatedStrategy.__init__).parameters)


def fit(module: L.LightningModule | None = None, rounds: int = 3, *, data=None, ckpt_path=None, **options: Any) -> Fit:
    """Federates a module: a new ``Classifier`` on the blobs, three clients a round, unless other ones are given.

    Options that ``FederatedStrategy`` knows go to it, all others to the Trainer.
    """
    module = fresh() if module is None else module
    own = {name: options.pop(name) for name in _STRATEGY & options.keys()}
    strategy = fl.FederatedStrategy(**{"clients_per_round": 3, "seed": 5, **own})
    trainer = quiet_trainer(strategy, rounds, **options)
    trainer.fit(module, federated_blobs() if data is None else data, ckpt_path=ckpt_path)
    return Fit(module, strategy, trainer)


def train(module: L.LightningModule | None = None, rounds: int = 3, **options: Any) -> Fit:
    """A fit without validation."""
    return fit(module, rounds, **{"limit_val_batches": 0, **options})


def place_of_client(trainer: L.Trainer) -> int:
    """Place in the round's cohort of the client that trains, or is about to; in a visit batches are the client's."""
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress if loop.clock._outside is None else loop.clock._outside[0]
    return progress.current.ready - 1


def fresh(module_class=Classifier, seed: int = 0, **options):
    """The same initial weights every time."""
    torch.manual_seed(seed)
    return module_class(**options)


def reload(state: Any) -> Any:
    """What a checkpoint gives back of a state."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def weights(module: nn.Module) -> Tensor:
    """All parameters and buffers in one vector."""
    return torch.cat([t.detach().double().flatten() for t in module.state_dict().values()])
