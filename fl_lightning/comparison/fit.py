# SPDX-License-Identifier: Apache-2.0
"""One fit of a run: it goes on from its newest checkpoint, and leaves a record."""

from __future__ import annotations

import inspect
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fl_lightning.comparison.fitted import Fitted
from fl_lightning.comparison.project import Parts
from fl_lightning.data.sources import defines
from fl_lightning.lightning.checkpoint_io import newest_checkpoint
from fl_lightning.lightning.names import Callback, LightningModule, Trainer
from fl_lightning.report import FitRecord
from fl_lightning.report.callbacks.fit_recorder import FitRecorder
from fl_lightning.report.record_builder import RecordBuilder

_CHECKPOINT = "newest.ckpt"


class Keeper(Callback):
    """Saves a checkpoint between rounds now and then, counts seconds, and tells of each round."""

    def __init__(self, folder: Path, save_seconds: float, tell: Callable[[], None]) -> None:
        self.folder, self._save_seconds, self._tell = folder, save_seconds, tell
        self._before, self._began = 0.0, time.perf_counter()
        self._saved = self._began

    @property
    def seconds(self) -> float:
        """Since the fit began, without pauses between an interruption and its resumption."""
        return self._before + time.perf_counter() - self._began

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A round and its validation are over."""
        if time.perf_counter() - self._saved >= self._save_seconds:
            trainer.save_checkpoint(self.folder / _CHECKPOINT)
            self._saved = time.perf_counter()
        self._tell()

    def state_dict(self) -> dict[str, Any]:
        """The seconds so far."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on counting."""
        self._before = state_dict["seconds"]


def fit(parts: Parts, keeper: Keeper) -> Fitted:
    """Trains, from the keeper's newest checkpoint if there is one, and evaluates."""
    recorder, folder = FitRecorder(), keeper.folder
    module, data, trainer = parts.module, parts.data, parts.trainer
    trainer.callbacks += [recorder, keeper]  # type: ignore[attr-defined]
    own: dict[str, Any] = {"weights_only": False}  # a file of ours: hyperparameters of all kinds may be in it
    own = {name: value for name, value in own.items() if name in inspect.signature(trainer.fit).parameters}
    found = newest_checkpoint(folder, weights_only=False) if folder.exists() else None
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(module, data, **({} if found is None else {"ckpt_path": found, **own}))
        if defines(data, "test_dataloader"):
            trainer.test(module, data, verbose=False)
        record = recorder.record
        last = record.last_values("val")
        if defines(data, "val_dataloader") and (last is None or last.round < trainer.current_epoch):
            record = _validated(record, parts)
    except SystemExit:
        if trainer.interrupted:
            signal.signal(signal.SIGINT, handler)  # Lightning lets it be ignored, because it ends the process
            raise KeyboardInterrupt from None
        raise
    return Fitted(record, keeper.seconds)


def _validated(record: FitRecord, parts: Parts) -> FitRecord:
    """The record with a validation at the end of the fit, where the last one lies some rounds back."""
    parts.trainer.validate(parts.module, parts.data, verbose=False)
    found = parts.trainer.strategy.last_evaluation  # type: ignore[attr-defined]
    if found is None or found.stage != "val":
        return record
    builder = RecordBuilder(record)
    builder.add_evaluation(found)
    return builder.record()
