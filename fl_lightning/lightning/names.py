# SPDX-License-Identifier: Apache-2.0
"""The one place that decides which Lightning is used.

``lightning`` and ``pytorch_lightning`` are two complete copies of the same classes. An instance of one is no instance
of the other. All files of this package import Lightning's names from here. A project that uses ``pytorch_lightning``
therefore works if that copy was imported first, or if ``FL_LIGHTNING_TREE=pytorch_lightning`` is set.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

_TREES = ("lightning.pytorch", "pytorch_lightning")


def _choose() -> str:
    wanted = os.environ.get("FL_LIGHTNING_TREE")
    if wanted is not None:
        if wanted not in _TREES:
            raise ImportError(f"FL_LIGHTNING_TREE must be one of {_TREES}, found {wanted!r}")
        return wanted
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        return "pytorch_lightning"
    return "lightning.pytorch"


TREE: str = _choose()


def lightning_module(path: str) -> Any:
    """Imports a submodule of the chosen tree, for instance ``lightning_module("loops.training_epoch_loop")``."""
    return import_module(f"{TREE}.{path}" if path else TREE)


if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, callbacks
    from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
    from lightning.pytorch.loggers.logger import DummyLogger, Logger
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn
    from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
else:
    pl: ModuleType = lightning_module("")
    Callback = pl.Callback
    LightningDataModule = pl.LightningDataModule
    LightningModule = pl.LightningModule
    Trainer = pl.Trainer
    callbacks = lightning_module("callbacks")
    ModelCheckpoint = callbacks.ModelCheckpoint
    ProgressBar = callbacks.ProgressBar
    DummyLogger = lightning_module("loggers.logger").DummyLogger
    Logger = lightning_module("loggers.logger").Logger
    SingleDeviceStrategy = lightning_module("strategies").SingleDeviceStrategy
    StrategyRegistry = lightning_module("strategies").StrategyRegistry
    ResultCollection = lightning_module("trainer.connectors.logger_connector.result")._ResultCollection
    ResultMetric = lightning_module("trainer.connectors.logger_connector.result")._ResultMetric
    RunningStage = lightning_module("trainer.states").RunningStage
    TrainerFn = lightning_module("trainer.states").TrainerFn
    rank_zero_info = lightning_module("utilities.rank_zero").rank_zero_info
    rank_zero_warn = lightning_module("utilities.rank_zero").rank_zero_warn

    def __getattr__(name: str) -> Any:
        # These pull in jsonargparse, an extra: only code that asks for them needs it.
        if name in ("LightningArgumentParser", "LightningCLI"):
            return getattr(lightning_module("cli"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextmanager
def quiet() -> Iterator[None]:
    """Leaves out what trainers and fits log at the level INFO: devices, paths, that an epoch was the last."""
    logger = logging.getLogger(f"{TREE}.utilities.rank_zero")
    level = logger.level
    logger.setLevel(max(logging.WARNING, level))
    try:
        yield
    finally:
        logger.setLevel(level)


def lightning_cli() -> Any:
    """LightningCLI, whose saved configurations lie beside logs alone; it exists only where the CLI extra does."""
    cli = lightning_module("cli")

    class SavesBesideLogs(cli.SaveConfigCallback):  # type: ignore[misc,name-defined]
        """Without a logger, runs share the working directory, where the file of a run before would stop the next."""

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if trainer.loggers:
                super().setup(trainer, pl_module, stage)

    class CLI(cli.LightningCLI):  # type: ignore[misc,name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{"save_config_callback": SavesBesideLogs, **kwargs})

    return CLI


__all__ = [
    "TREE", "Callback", "DummyLogger", "LightningArgumentParser", "LightningCLI", "LightningDataModule",
    "LightningModule", "Logger", "ModelCheckpoint", "ProgressBar", "ResultCollection", "ResultMetric", "RunningStage",
    "SingleDeviceStrategy", "StrategyRegistry", "Trainer", "TrainerFn", "callbacks",
    "lightning_cli", "lightning_module", "pl", "quiet", "rank_zero_info", "rank_zero_warn",
]  # fmt: skip
