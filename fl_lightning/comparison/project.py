# SPDX-License-Identifier: Apache-2.0
"""What is compared on: how to make the module, the data and the trainer of a run anew."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import nn

from fl_lightning.algorithms import ClientRule, ServerRule
from fl_lightning.comparison.plan import Run
from fl_lightning.core.seeding import seed_all
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.lightning.fit_description import plain
from fl_lightning.lightning.names import (
    LightningDataModule,
    LightningModule,
    ModelCheckpoint,
    ProgressBar,
    Trainer,
    callbacks,
    lightning_cli,
)

RATE_NAMES = ("lr", "learning_rate")
"""What the argument of a module may be called that is its learning rate."""
_REPLACED = ("seed_everything", "ckpt_path", "weights_only", "trainer.default_root_dir", "trainer.strategy", "config")


@dataclass(frozen=True)
class Parts:
    """What one run trains: a module with its first weights, divided data, and a trainer with the run's strategy."""

    module: LightningModule
    data: LightningDataModule
    trainer: Trainer


class ObjectProject:
    """A project in Python objects, as :func:`fl_lightning.compare` takes them."""

    def __init__(
        self,
        model: Callable[..., LightningModule],
        data: FederatedDataModule | Callable[[], FederatedDataModule],
        trainer: Callable[..., Trainer],
    ) -> None:
        self._model, self._data, self._trainer = model, data, trainer
        self._trained = WeakValueDictionary[int, nn.Parameter]()

    def build(self, run: Run, strategy: FederatedStrategy, root: Path) -> Parts:
        """Makes all parts anew, after seeding, in a ``default_root_dir``."""
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
        data = self._data if isinstance(self._data, FederatedDataModule) else self._data()
        # Callbacks among its arguments would go on where the run before has left them.
        trainer = deepcopy(self._trainer)(strategy=strategy, default_root_dir=root)
        return Parts(module, divided(data, run.division), bare(trainer))

    def configuration(self) -> Mapping[str, Any]:
        """Whatever changes results, the strategies apart: of functions and objects, their names and arguments."""
        return described_each("", {"model": self._model, "data": self._data, "trainer": self._trainer})


class YamlProject:
    """A project in YAML, as ``python -m fl_lightning fit`` takes it; methods replace its strategy's ``algorithm``."""

    def __init__(self, options: Sequence[str]) -> None:
        logging.disable(logging.INFO)  # what Lightning has to remark belongs to the runs
        try:
            cli = _cli(["fit", *options])
        finally:
            logging.disable(logging.NOTSET)
        bare(cli.trainer)
        self._config = cli.config.clone()
        config = self._config["fit"]
        if config.get("ckpt_path") is not None:
            raise ValueError(f"ckpt_path must be left out of a comparison, found {config['ckpt_path']}")
        found = cli.config_init["fit"]["trainer"]["strategy"]
        self.strategy = FederatedStrategy() if found == FederatedStrategy.strategy_name else found
        if not isinstance(self.strategy, FederatedStrategy):
            raise ValueError(
                f"trainer.strategy must be federated or a class_path of fl_lightning.FederatedStrategy, found {found!r}"
            )
        # Files of the runs are the same wherever their strategies come from.
        config["trainer"]["strategy"] = FederatedStrategy.strategy_name

    def learning_rate(self) -> float | None:
        """The learning rate in the file; ``None`` if it has none that could be replaced."""
        place = self._rate_place()
        return None if place is None else float(self._config["fit"][place])

    def check_learning_rates(self) -> None:
        """Refuses learning rates where nothing in the file can be replaced by them."""
        if self._rate_place() is None:
            raise ValueError(
                "the learning rates of --lr replace optimizer.init_args.lr, the model's argument lr or learning_rate, "
                "or the lr of an optimizer among the model's arguments, and the file has none of these: give the "
                "model such an argument, or leave --lr out"
            )

    def _rate_place(self) -> str | None:
        places = ["optimizer.init_args.lr"]  # LightningCLI lets it take the place of the model's own
        places += [f"model.init_args.{name}" for name in RATE_NAMES]
        places += ["model.init_args.optimizer.init_args.lr"]
        config = self._config["fit"]
        return next((place for place in places if isinstance(config.get(place), (int, float))), None)

    def build(self, run: Run, strategy: FederatedStrategy, root: Path) -> Parts:
        """Lets LightningCLI make everything anew, with the run's seed and learning rate."""
        config = self._config.clone()
        config["fit"]["seed_everything"] = run.seed
        if run.learning_rate is not None:
            config["fit"][self._rate_place()] = run.learning_rate
        cli = _cli(config, strategy=strategy, default_root_dir=str(root))
        return Parts(cli.model, divided(cli.datamodule, run.division), bare(cli.trainer))

    def configuration(self) -> Mapping[str, Any]:
        """The file with all defaults filled in, without what is replaced in each run."""
        left_out = {*_REPLACED, self._rate_place()}
        entries = vars(self._config["fit"].as_flat()).items()
        return {name: plain(value) for name, value in entries if name not in left_out}


def _cli(arguments: Any, **replaced: Any) -> Any:
    """LightningCLI up to the point where ``fit`` would begin."""
    base: Any = lightning_cli()

    class Reader(base):  # type: ignore[misc]
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {"fit": base.subcommands()["fit"]}  # making parsers for the others takes long

        def parse_arguments(self, parser: Any, args: Any) -> None:
            # LightningCLI would warn of the options in sys.argv, which are not meant for it.
            self.config = parser.parse_args(args) if isinstance(args, list) else parser.parse_object(args)

        def instantiate_trainer(self, **kwargs: Any) -> Trainer:
            return super().instantiate_trainer(**kwargs, **replaced)  # type: ignore[no-any-return]

        fit: Callable[..., None] = staticmethod(lambda **parts: None)

    return Reader(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        seed_everything_default=False,
        args=arguments,
        parser_kwargs={"prog": "python -m fl_lightning compare"},
    )


Project: TypeAlias = ObjectProject | YamlProject
"""Makes the parts of runs."""


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


def divided(data: object, division: int) -> FederatedDataModule:
    """One of the divisions of federated data."""
    if not isinstance(data, FederatedDataModule):
        raise ValueError(f"data must be a FederatedDataModule, found {type(data).__name__}")
    return data.divided_anew(data.seed + division) if division else data


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
