# SPDX-License-Identifier: Apache-2.0
"""Files and texts of a run, for loggers that keep more than numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_lightning.lightning.names import Trainer, lightning_module

_LOGGERS: Any = lightning_module("loggers")


def run_folder(trainer: Trainer) -> Path | None:
    """The folder of this run's files, by its first logger; ``None`` without a logger that has one.

    MLflow and W&B have one folder for all runs. There it is the one beside Lightning's own checkpoints.
    """
    if not trainer.loggers:
        return None
    first, folder = trainer.loggers[0], trainer.log_dir
    if isinstance(first, (_LOGGERS.MLFlowLogger, _LOGGERS.WandbLogger)):
        return Path(folder or trainer.default_root_dir, str(first.name), str(first.version))
    return None if folder is None else Path(folder)


def hand_over(trainer: Trainer, path: Path, title: str, text: str, step: int) -> None:
    """Gives a file to MLflow and W&B as an artifact, and its text to TensorBoard."""
    for logger in trainer.loggers:
        tracker: Any = logger
        if isinstance(logger, _LOGGERS.MLFlowLogger):
            tracker.experiment.log_artifact(tracker.run_id, str(path))
        elif isinstance(logger, _LOGGERS.WandbLogger):
            tracker.experiment.log_artifact(str(path), name=f"{path.stem}-{tracker.version}", type="table")
        elif isinstance(logger, _LOGGERS.TensorBoardLogger):
            tracker.experiment.add_text(title, f"```\n{text}\n```", step)
