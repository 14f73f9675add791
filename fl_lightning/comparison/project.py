# SPDX-License-Identifier: Apache-2.0
"""What is compared on: how to make the module, the data and the trainer of a run anew."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn

from fl_lightning.algorithms import ClientRule, ServerRule
from fl_lightning.comparison.plan import Run
from fl_lightning.core.seeding import seed_all
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.partitions import Partition
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.lightning.fit_description import plain
from fl_lightning.lightning.names import (
    LightningDataModule,
    LightningModule,
    ModelCheckpoint,
    ProgressBar,
    Trainer,
    callbacks,
)

RATE_NAMES = ("lr", "learning_rate")
"""What the argument of a module may be called that is its learning rate."""


@dataclass(frozen=True)
class Parts:
    """What one run trains: a module with its first weights, divided data, and a trainer with the run's strategy."""

    module: LightningModule
    data: LightningDataModule
    trainer: Trainer


class Project(Protocol):
    """Makes the parts of runs."""

    def build(self, run: Run, strategy: FederatedStrategy, root: Path) -> Parts:
        """Makes all parts anew, after seeding, in a ``default_root_dir``; the strategy has no ``partition``."""

    def configuration(self) -> Mapping[str, Any]:
        """Whatever changes results, in plain values by name; the strategies apart."""


class ObjectProject:
    """A project in Python objects, as :func:`fl_lightning.compare` takes them."""

    def __init__(
        self,
        model: Callable[..., LightningModule],
        data: LightningDataModule | Callable[[], LightningDataModule] | None,
        trainer: Callable[..., Trainer],
        partition: object,
        seed: int,
    ) -> None:
        self._model, self._data, self._trainer = model, data, trainer
        self._partition, self._seed = partition, seed
        self._trained = WeakValueDictionary[int, nn.Parameter]()

    def build(self, run: Run, strategy: FederatedStrategy, root: Path) -> Parts:
        """Seeds, and calls the functions."""
        seed_all(run.seed, torch.device("cpu"))
        rate = {} if run.learning_rate is None else {rate_name(self._model): run.learning_rate}
        module = self._model(**rate)
        if not isinstance(module, LightningModule):
            raise TypeError(
                f"model must return a LightningModule, such as fl.ClientModule around a network, found "
                f"{type(module).__name__}"
            )
        if any(self._trained.get(id(parameter)) is parameter for parameter in module.parameters()):
            raise ValueError("model must make a new network in every call, found one that another run has trained")
        self._trained.update({id(parameter): parameter for parameter in module.parameters()})
        data = self._data if self._data is None or isinstance(self._data, LightningDataModule) else self._data()
        # Callbacks among its arguments would go on where the run before has left them.
        trainer = deepcopy(self._trainer)(strategy=strategy, default_root_dir=root)
        return Parts(module, divided(data, module, self._partition, self._seed, run.division), bare(trainer))

    def configuration(self) -> Mapping[str, Any]:
        """What can be said of functions and objects: their names and arguments."""
        given = {"model": self._model, "data": self._data, "trainer": self._trainer}
        return described_each("", given | division(self._partition, self._seed))


def rate_name(model: Callable[..., Any]) -> str:
    """The name under which a function takes a learning rate."""
    parameters = inspect.signature(model).parameters
    for name in RATE_NAMES:
        if name in parameters:
            return name
    raise ValueError(
        "model must take the learning rate as an argument lr or learning_rate where learning_rates are given, found "
        f"{plain(model)}({', '.join(parameters)}): pass a function such as lambda lr: MyModule(step_size=lr)"
    )


def divided(
    data: object, module: LightningModule, partition: object, seed: int, division: int = 0
) -> FederatedDataModule:
    """Data divided among clients: as they say, or by a strategy's partition."""
    if isinstance(data, FederatedDataModule):
        return data.divided_anew(data.seed + division) if division else data
    source: Any = module if data is None else data
    if isinstance(partition, Partition) or (partition is not None and not callable(partition)):
        return FederatedDataModule(source, partition, seed=seed + division)  # type: ignore[arg-type]
    if callable(partition):
        made = partition(source)
        if isinstance(made, FederatedDataModule):
            return made.divided_anew(made.seed + division) if division else made
    raise ValueError(
        "data must be a FederatedDataModule, or the strategy must have a partition that divides it, found "
        f"{type(source).__name__} and partition={partition!r}"
    )


def division(partition: object, seed: int) -> dict[str, Any]:
    """What says how :func:`divided` divides."""
    return {} if partition is None else {"partition": partition, "seed of the partition": seed}


def bare(trainer: Trainer) -> Trainer:
    """Takes from a trainer what one of many runs has no use for: bars, summaries, and checkpoints of its own."""
    if trainer.max_epochs is None or trainer.max_epochs < 1:
        raise ValueError(f"max_epochs of the trainer must be a positive number of rounds, found {trainer.max_epochs}")
    ranks = getattr(trainer.strategy, "ranks", None)
    if ranks is not None:
        raise ValueError(
            "devices and num_nodes of the trainer must be 1, because a run is one process and jobs says how many there "
            f"are at a time, found {ranks.size} processes"
        )
    idle = (ModelCheckpoint, ProgressBar, callbacks.ModelSummary)
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, idle)]  # type: ignore[attr-defined]
    return trainer


def described(name: str, value: Any) -> dict[str, Any]:
    """An object in plain values by name, as far as names and arguments tell."""
    if isinstance(value, partial):
        arguments = {**{str(place): given for place, given in enumerate(value.args)}, **value.keywords}
        return {name: plain(value.func), **described_each(f"{name}.", arguments)}
    if isinstance(value, (ServerRule, ClientRule)):
        return {name: plain(type(value)), **described_each(f"{name}.", value.hyperparameters())}
    if isinstance(value, FederatedDataModule):
        own = {"partition": value.partition, "seed": value.seed, **dict(value.hparams)}
        return {name: type(value.data).__name__, **described_each(f"{name}.", own)}
    return {name: plain(value)}


def described_each(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Several values, their names behind a prefix."""
    return {key: entry for name, value in values.items() for key, entry in described(f"{prefix}{name}", value).items()}
