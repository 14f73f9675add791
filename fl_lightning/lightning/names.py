# SPDX-License-Identifier: Apache-2.0
"""The one place that decides which Lightning is used, and checks that it has the private names in use.

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
from importlib import import_module, metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fl_lightning.lightning.metric_state import CONTRACT as METRICS
from fl_lightning.lightning.metric_state import lacking

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


CONTRACT: dict[str, tuple[str, ...]] = {
    "lightning_module": ("_current_fx_name", "_on_before_batch_transfer"),
    "fit_loop": ("epoch_loop", "epoch_progress", "state_dict", "load_state_dict", "_restarting", "_combined_loader",
        "_should_reload_train_dl", "_data_source", "max_batches", "setup_data"),
    "fit_loop.epoch_loop": (
        "val_loop", "batch_progress", "scheduler_progress", "automatic_optimization", "manual_optimization",
        "_results", "_batches_that_stepped", "_skip_next_val", "_restarting", "_build_kwargs", "update_lr_schedulers",
        "_update_learning_rates",
        "_num_ready_batches_reached", "_should_check_val_epoch", "_should_check_val_fx", "restarting", "max_steps",
        "on_save_checkpoint", "on_load_checkpoint",
    ),
    "fit_loop.epoch_loop.automatic_optimization": (
        "run", "optim_progress", "_make_zero_grad_fn", "_on_before_zero_grad", "_optimizer_zero_grad", "_skip_backward",
    ),
    "fit_loop.epoch_loop.manual_optimization": ("run", "optim_step_progress"),
    "fit_loop.epoch_loop.val_loop": (
        "batch_progress", "_results", "restarting", "_on_evaluation_model_train", "_evaluation_step", "_max_batches",
        "_data_source", "_store_dataloader_outputs",
    ),
    "fit_loop.epoch_loop._results": ("_forked_name",),
    "validate_loop": ("_evaluation_step", "_max_batches", "_results", "_data_source", "_store_dataloader_outputs"),
    "test_loop": ("_evaluation_step", "_max_batches", "_results", "_data_source", "_store_dataloader_outputs"),
    "predict_loop": ("_data_source",),
    "_signal_connector": ("received_sigterm", "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"),
    "strategy": ("_configure_launcher",),
    "_data_connector": ("attach_datamodule", "_datahook_selector"),
    "_logger_connector": (
        "on_batch_start", "on_batch_end", "update_train_step_metrics", "log_metrics", "_callback_metrics",
        "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter", "_current_fx",
    ),
}  # fmt: skip
"""Private and other attributes in use, by the path from the trainer to their owner."""


def check_contract(trainer: Trainer) -> None:
    """Checks that this Lightning still has the private attributes in use, and names those that it lacks."""
    if found := lacking(METRICS):
        version = metadata.version("torchmetrics")
        raise RuntimeError(f"torchmetrics {version} is not supported: it lacks {found}; use torchmetrics 1.4 to 1.9")
    for path, names in CONTRACT.items():
        owner: Any = trainer
        for part in path.split("."):
            owner = getattr(owner, part)
        if owner is None:
            continue  # a trainer without a module yet
        missing = [name for name in names if not hasattr(owner, name)]
        if missing:
            version = lightning_module("").__version__
            raise RuntimeError(
                f"{TREE} {version} is not supported: trainer.{path} lacks {missing}; "
                "fl_lightning was written for lightning 2.5.3 to 2.6"
            )


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
    "CONTRACT", "TREE", "Callback", "DummyLogger", "LightningArgumentParser", "LightningCLI", "LightningDataModule",
    "LightningModule", "Logger", "ModelCheckpoint", "ProgressBar", "ResultCollection", "ResultMetric", "RunningStage",
    "SingleDeviceStrategy", "StrategyRegistry", "Trainer", "TrainerFn", "callbacks", "check_contract",
    "lightning_cli", "lightning_module", "pl", "quiet", "rank_zero_info", "rank_zero_warn",
]  # fmt: skip
