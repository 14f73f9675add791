# SPDX-License-Identifier: Apache-2.0
"""One fit of a run: it goes on from its newest checkpoint, and leaves a record."""

from __future__ import annotations

import inspect
import signal
import time
from pathlib import Path
from typing import Any

from fl_lightning.comparison.project import Parts
from fl_lightning.data.sources import defines
from fl_lightning.lightning.checkpoint_io import newest_checkpoint
from fl_lightning.lightning.names import Callback, LightningModule, Trainer
from fl_lightning.report import FitRecord
from fl_lightning.report.callbacks.fit_recorder import FitRecorder
from fl_lightning.report.record_builder import RecordBuilder


class _Saves(Callback):
    """Saves a checkpoint between rounds now and then."""

    def __init__(self, folder: Path, save_seconds: float) -> None:
        self._file, self._save_seconds, self._saved = folder / "newest.ckpt", save_seconds, time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A round and its validation are over."""
        if time.perf_counter() - self._saved >= self._save_seconds:
            trainer.save_checkpoint(self._file)
            self._saved = time.perf_counter()


def fit(parts: Parts, folder: Path | None = None, save_seconds: float = 0.0) -> FitRecord:
    """Trains, from the newest checkpoint if there is one, and evaluates.

    Args:
        parts: what to train; the trainer gets callbacks.
        folder: for checkpoints; ``None``: none are written or read.
        save_seconds: least time between two of them.
    """
    recorder, module, data, trainer = FitRecorder(), parts.module, parts.data, parts.trainer
    trainer.callbacks += [recorder]  # type: ignore[attr-defined]
    options: dict[str, Any] = {}
    if folder is not None:
        trainer.callbacks += [_Saves(folder, save_seconds)]  # type: ignore[attr-defined]
        found = newest_checkpoint(folder, weights_only=False) if folder.exists() else None
        # A file of ours: hyperparameters of all kinds may be in it.
        own = {"ckpt_path": found, "weights_only": False}
        known = inspect.signature(trainer.fit).parameters
        options = {} if found is None else {name: value for name, value in own.items() if name in known}
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(module, data, **options)
        if defines(data, "test_dataloader"):
            trainer.test(module, data, verbose=False)
        record = recorder.record
        last = record.last_values("val")
        if defines(data, "val_dataloader") and (last is None or last.round < trainer.current_epoch):
            return _validated(record, parts)
    except SystemExit:
        if trainer.interrupted:
            signal.signal(signal.SIGINT, handler)  # Lightning lets it be ignored, because it ends the process
            raise KeyboardInterrupt from None
        raise
    return record


def _validated(record: FitRecord, parts: Parts) -> FitRecord:
    """The record with a validation at the end of the fit, where the last one lies some rounds back."""
    parts.trainer.validate(parts.module, parts.data, verbose=False)
    found = parts.trainer.strategy.last_evaluation  # type: ignore[attr-defined]
    builder = RecordBuilder(record)
    if found is not None and found.stage == "val":
        builder.add_evaluation(found)
    return builder.record()
