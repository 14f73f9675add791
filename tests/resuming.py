# SPDX-License-Identifier: Apache-2.0
"""Fits that are interrupted and resumed, and what must be equal afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import Logger
from support import FEATURES, Classifier, federated_blobs, fresh, quiet_trainer
from torch import Tensor

import fl_lightning as fl

_OPTIONS: dict[str, dict[str, Any]] = {
    "FA": {"bases": 2 * torch.eye(FEATURES), "sigma": 4.0},
    "FedMDFG": {"s": 2},
    "FedProx": {"mu": 0.1},
    "FedRep": {"head_epochs": 0},  # there is one local epoch
    "MMPF": {"inner_rounds": 1},
}
ALGORITHMS: dict[str, Callable[[], Any]] = {
    name: partial(rule, **_OPTIONS.get(name, {}))
    for name, rule in vars(fl.algorithms).items()
    if isinstance(rule, type) and issubclass(rule, fl.algorithms.ServerRule) and rule is not fl.algorithms.ServerRule
}
"""Every method that the package exports."""


class Rows(Logger):
    """Keeps what it is given, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name, version = "rows", 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, {k: float(v) for k, v in metrics.items() if k != "fed/seconds"}))


class SaveAt(L.Callback):
    """Saves a checkpoint in hooks of one round, and notes how many rows had been logged."""

    def __init__(self, folder: Path, round_index: int, hooks: tuple[str, ...]) -> None:
        self.folder, self.round, self.hooks = folder, round_index, hooks
        self.logged: dict[str, int] = {}

    def _save(self, trainer: L.Trainer, name: str, hook: str | None = None) -> None:
        here = trainer.current_epoch == self.round or name in ("on_train_start", "on_train_end")
        if {name, hook} & set(self.hooks) and here and not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{name}.ckpt")
            self.logged[name] = len(trainer.logger.rows)

    def on_train_epoch_start(self, trainer, module) -> None:
        self._save(trainer, "on_train_epoch_start")

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self._save(trainer, f"on_train_batch_start-{batch_idx}", "on_train_batch_start")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self._save(trainer, f"on_train_batch_end-{batch_idx}", "on_train_batch_end")

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0) -> None:
        if batch_idx == 2:
            self._save(trainer, "on_validation_batch_end")


def _saves(hook: str) -> Callable[..., None]:
    return lambda self, trainer, module, *args: self._save(trainer, hook)


PLAIN_HOOKS = (
    "on_train_start", "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end",
    "on_validation_end", "on_train_epoch_end", "on_train_end",
)  # fmt: skip
for _hook in PLAIN_HOOKS:
    setattr(SaveAt, _hook, _saves(_hook))

ALL_HOOKS = (
    *PLAIN_HOOKS, "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_validation_batch_end",
)  # fmt: skip


@dataclass
class Project:
    """How to build a fit; every call builds everything anew, as a new process would."""

    algorithm: Callable[[], Any] = fl.algorithms.FedAvg
    module: Callable[..., L.LightningModule] = Classifier
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Path], list[L.Callback]] = lambda folder: []
    rounds: int = 4
    samples: int = 240

    def fit(
        self, folder: Path, rounds: int | None = None, ckpt_path: Path | None = None, extra: tuple[L.Callback, ...] = ()
    ) -> ClientResult:
        # A resumed fit starts from other weights and other generators.
        module = fresh(self.module, seed=0 if ckpt_path is None else 100, **self.options)
        strategy = fl.FederatedStrategy(self.algorithm(), **{"clients_per_round": 3, "seed": 5, **self.strategy})
        limits = {"max_epochs": rounds or self.rounds, **self.trainer}
        callbacks = [*self.callbacks(folder), *extra]
        limits["enable_checkpointing"] = any(isinstance(callback, Checkpoint) for callback in callbacks)
        trainer = quiet_trainer(strategy, logger=Rows(), callbacks=callbacks, **limits)
        trainer.fit(module, federated_blobs(train=self.samples), ckpt_path=ckpt_path)
        return ClientResult(module, trainer, strategy)


class ClientResult:
    """What a fit leaves behind."""

    def __init__(self, module: L.LightningModule, trainer: L.Trainer, strategy: fl.FederatedStrategy) -> None:
        self.module, self.trainer, self.strategy = module, trainer, strategy
        self.rows: list[tuple[int | None, dict[str, float]]] = trainer.logger.rows
        counters = trainer.fit_loop.state_dict()
        counters["epoch_loop.state_dict"] = trainer.fit_loop.epoch_loop._batches_that_stepped
        self.state = {
            "weights": {name: value.clone() for name, value in module.state_dict().items()},
            "options": [
                [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in trainer.optimizers
            ],
            "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
            "global_step": trainer.global_step,
            "current_epoch": trainer.current_epoch,
            "metrics": {k: v.clone() for k, v in trainer.callback_metrics.items() if k != "fed/seconds"},
            "rules": strategy._fits.states(),
            "counters": counters,
            "stopped": (trainer.should_stop, [callback.wait_count for callback in trainer.early_stopping_callbacks]),
        }

    def save(self, path: Path) -> None:
        self.trainer.save_checkpoint(path)


def differences(one: Any, two: Any, where: str = "") -> list[str]:
    """Where two nested structures are not equal bit for bit."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        if list(one) != list(two) and set(one) != set(two):
            return [f"{where}: keys {sorted(map(str, set(one) ^ set(two)))} are on one side only"]
        return [d for key in one for d in differences(one[key], two[key], f"{where}/{key}")]
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        if len(one) != len(two):
            return [f"{where}: {len(one)} and {len(two)} items"]
        return [d for i, (a, b) in enumerate(zip(one, two, strict=True)) for d in differences(a, b, f"{where}/{i}")]
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        same = one.dtype == two.dtype and one.shape == two.shape and _bytes(one) == _bytes(two)
        return [] if same else [f"{where}: {one} and {two}"]
    if isinstance(one, float) and isinstance(two, float) and one != one and two != two:
        return []
    return [] if type(one) is type(two) and one == two else [f"{where}: {one!r} and {two!r}"]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def by_step(rows: list[tuple[int | None, dict[str, float]]]) -> dict[tuple[int | None, str], float]:
    """What was logged, by step and name; a client that trains again must log the same again."""
    found: dict[tuple[int | None, str], float] = {}
    for step, row in rows:
        for name, value in row.items():
            assert not differences(found.setdefault((step, name), value), value, f"{name} of step {step}")
    return found


def assert_equal(resumed: ClientResult, whole: ClientResult, logged: int | None = None, name: object = "") -> None:
    """The resumed fit ends where the uninterrupted one does.

    It logs what that logged beside its first ``logged`` rows (default: up to the step of its own first row), and maybe
    some of these again.
    """
    found = differences(resumed.state, whole.state)
    first = whole.rows[:logged] if logged is not None else [r for r in whole.rows if r[0] <= resumed.rows[0][0]]
    found += differences(by_step(first + resumed.rows), by_step(whole.rows), "logged")
    assert not found, f"{name}: " + "\n".join(found[:20])
