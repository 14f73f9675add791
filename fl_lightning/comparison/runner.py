# SPDX-License-Identifier: Apache-2.0
"""Carries out the runs of a comparison, one at a time, and keeps what they leave as a file each."""

from __future__ import annotations

import inspect
import logging
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fl_lightning.comparison.bounds import OneLearner, bound_strategy, merged
from fl_lightning.comparison.files import read_run, write_run
from fl_lightning.comparison.plan import Run
from fl_lightning.comparison.project import Parts, Project
from fl_lightning.core.seeding import isolated
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.lightning.checkpoint_io import newest_checkpoint
from fl_lightning.lightning.inspection import is_overridden
from fl_lightning.lightning.names import Callback, LightningModule, Trainer
from fl_lightning.report import FitRecord
from fl_lightning.report.callbacks.fit_recorder import FitRecorder
from fl_lightning.report.conclusion import LOCAL, POOLED
from fl_lightning.report.record_builder import RecordBuilder


@dataclass(frozen=True)
class Runner:
    """Knows how to carry out every run of a :class:`~fl_lightning.comparison.session.Session`."""

    project: Project
    strategies: Mapping[str, FederatedStrategy]
    base: FederatedStrategy
    folder: Path
    save_seconds: float

    def finished(self, run: Run) -> FitRecord | None:
        """What a run has left, or ``None`` if it is not over."""
        return read_run(self._file(run))

    def carry_out(self, run: Run) -> None:
        """Carries a run out, from where it was interrupted, and writes its file."""
        folder = self.folder / "checkpoints" / run.key
        with self._logged(run):
            if run.method == LOCAL:
                found = self._clients_alone(run, folder)
            elif run.method == POOLED:
                found = self._pooled(run, folder)
            else:
                found = fit(self._build(run, self.strategies[run.method]), folder, self.save_seconds)
        rate = found.learning_rate if run.learning_rate is None else run.learning_rate
        record = replace(
            found, method=run.method, seed=run.seed, division=run.division, learning_rate=rate, status="finished",
            is_bound=run.method in (LOCAL, POOLED),
        )  # fmt: skip
        write_run(self._file(run), record)
        shutil.rmtree(folder, ignore_errors=True)

    def check_divisions(self, run: Run) -> None:
        """Refuses divisions that would all be the same."""
        found = []
        for division in (0, 1):
            one = replace(run, division=division)
            with self._logged(one):
                data = self._learner(one).federated
                stages = [stage for stage in ("train", "val", "test") if is_overridden(f"{stage}_dataloader", data)]
                loaders = [getattr(data, f"{stage}_dataloader")() for stage in stages]
                each = [one for some in loaders for one in (some if isinstance(some, list) else [some])]
                found.append([one.fingerprint() for one in each if isinstance(one, ClientLoaders)])
        if found[0] == found[1]:
            raise ValueError(
                "divisions must be 1 where the seed of the data decides nothing, found more: clients and their "
                "evaluation data are given. FederatedDataModule(holdout=...) draws what is set aside by the seed"
            )

    def _pooled(self, run: Run, folder: Path) -> FitRecord:
        learner = self._learner(run)
        learner.choose(learner.clients, None)
        parts = replace(self._build(run, bound_strategy(self.base, len(learner.clients))), data=learner)
        return learner.renamed(fit(parts, folder, self.save_seconds))

    def _clients_alone(self, run: Run, folder: Path) -> FitRecord:
        learner, fits = self._learner(run), dict[int, FitRecord]()
        for client in learner.clients:
            place = folder / f"client-{client:06d}"
            found = read_run(place.with_suffix(".json"))
            if found is None:
                learner.choose([client], [client])
                parts = self._build(run, bound_strategy(self.base, 1))
                parts.trainer.logger = None  # a folder of logs per client helps nobody
                found = fit(replace(parts, data=learner), place, self.save_seconds)
                write_run(place.with_suffix(".json"), found)
                shutil.rmtree(place, ignore_errors=True)
            fits[client] = found
        return merged(fits, learner.names, learner.sizes)

    def _learner(self, run: Run) -> OneLearner:
        return OneLearner(self._build(run, bound_strategy(self.base, 1)).data)

    def _build(self, run: Run, strategy: FederatedStrategy) -> Parts:
        root = self.folder / "logs" / run.key
        return self.project.build(run, strategy.with_arguments(seed=run.seed), root)

    def _file(self, run: Run) -> Path:
        return self.folder / "runs" / f"{run.key}.json"

    @contextmanager
    def _logged(self, run: Run) -> Iterator[None]:
        """What a run prints goes to its log; it computes with one thread and leaves generators as they were."""
        threads = torch.get_num_threads()
        with _quiet(self.folder / "logs" / run.key / "log.txt"), isolated(run.seed, torch.device("cpu")):
            torch.set_num_threads(1)
            try:
                yield
            except Exception:
                traceback.print_exc()
                raise
            finally:
                torch.set_num_threads(threads)


@contextmanager
def _quiet(path: Path) -> Iterator[None]:
    """While this lasts, prints, warnings and log messages of this process are added to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    screens = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in tuple(logging.root.manager.loggerDict))]
    handlers: list[logging.StreamHandler[Any]] = [
        handler
        for logger in loggers
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in screens
    ]
    with path.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        streams = [handler.setStream(file) for handler in handlers]
        try:
            yield
        finally:
            for handler, stream in zip(handlers, streams, strict=True):
                if stream is not None:
                    handler.setStream(stream)


class _Saves(Callback):
    """Saves a checkpoint between rounds now and then."""

    def __init__(self, folder: Path, save_seconds: float) -> None:
        self._file, self._save_seconds, self._saved = folder / "newest.ckpt", save_seconds, time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A round and its validation are over."""
        if time.perf_counter() - self._saved >= self._save_seconds:
            trainer.save_checkpoint(self._file)
            self._saved = time.perf_counter()


def fit(parts: Parts, folder: Path, save_seconds: float) -> FitRecord:
    """Trains, from the newest checkpoint in ``folder`` if there is one, and evaluates.

    Checkpoints are at least ``save_seconds`` apart.
    """
    recorder, module, data, trainer = FitRecorder(), parts.module, parts.data, parts.trainer
    trainer.callbacks += [recorder, _Saves(folder, save_seconds)]  # type: ignore[attr-defined]
    found = newest_checkpoint(folder, weights_only=False) if folder.exists() else None
    # A file of ours: hyperparameters of all kinds may be in it.
    own = {} if found is None else {"ckpt_path": found, "weights_only": False}
    known = inspect.signature(trainer.fit).parameters
    options: dict[str, Any] = {name: value for name, value in own.items() if name in known}
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(module, data, **options)
        if is_overridden("test_dataloader", data):
            trainer.test(module, data, verbose=False)
        record = recorder.record
        last = record.last_values("val")
        if is_overridden("val_dataloader", data) and (last is None or last.round < trainer.current_epoch):
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
