# SPDX-License-Identifier: Apache-2.0
"""Cases that are federated fits: made of the library's public parts and a Lightning Trainer."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

import fl_lightning as fl
from benchmarks.papers.experiment import Case, Job, Log
from benchmarks.papers.networks import seconds_per_sample
from fl_lightning.algorithms import ClientRule, ServerRule
from fl_lightning.algorithms.guards import Guard
from fl_lightning.metrics.functional import fairness_summary

KEPT = ("mean", "angle", "std", "worst_5", "worst_10", "best_5", "best_10", "min", "max")
FEW = 20  # clients whose own accuracies are written down
LOSS_BATCH = 1024  # cross entropies are means over samples: large batches only save time


class Task(ABC):
    """Data of a federation.

    Attributes:
        shape: of one image.
        train: training samples, about.
        test: samples of an evaluation, about.
    """

    shape: tuple[int, ...]
    train: int
    test: int

    @abstractmethod
    def check(self, root: Path) -> None:
        """Raises MissingDataError unless the data is there."""

    @abstractmethod
    def federate(self, root: Path, seed: int, batch_size: int) -> fl.FederatedDataModule:
        """Reads and divides the data; what is tested is its validation data.

        Raises:
            MissingDataError: it is not there.
        """


@dataclass(frozen=True)
class Training:
    """How clients train.

    Attributes:
        online: clients per round, a count or a share.
        batch_size: samples per batch.
        lr: learning rate of the first round.
        decay: factor of the learning rate from round to round.
        epochs: passes over a client's data per round.
        momentum: of SGD.
        weight_decay: of SGD.
        full_gradients: one full-batch gradient instead of local training.
    """

    online: int | float
    batch_size: int
    lr: float = 0.1
    decay: float = 0.999
    epochs: int = 1
    momentum: float = 0.0
    weight_decay: float = 0.0
    full_gradients: bool = False


Attacks = Callable[[int], fl.attacks.Attack]
"""Makes an attack from the seed of the run."""


@dataclass(frozen=True)
class FederatedCase(Case):
    """A federated fit.

    Attributes:
        task: the data and its division.
        network: makes the network.
        rule: makes the method.
        training: how clients train.
        every: rounds from one evaluation to the next.
        client: makes the client half of another method.
        attack: what dishonest clients do.
        honest_only: accuracies of dishonest clients do not count.
        guard: makes the guard before the method; ``None``: none.
        classes: outputs of the network.
        start: changes the initial weights.
        noted: finds more to write at every evaluation, in the method.
    """

    name: str
    task: Task
    network: Callable[[], nn.Module]
    rule: Callable[[], ServerRule]
    training: Training
    rounds: int
    every: int
    seeds: tuple[int, ...] = (0,)
    published: Mapping[str, float] = field(default_factory=dict)
    client: Callable[[], ClientRule | ServerRule] | None = None
    attack: Attacks | None = None
    honest_only: bool = False
    guard: Callable[[], Guard] | None = None
    classes: int = 10
    start: Callable[[fl.ClientModule, fl.FederatedDataModule], None] | None = None
    noted: Callable[[Any], Mapping[str, float | list[float]]] | None = None

    def check(self, root: Path) -> None:
        """See the base class."""
        self.task.check(root)

    def cost(self, rounds: int) -> float:
        """Timed on a few batches of random pixels."""
        step, forward = seconds_per_sample(self.network, self.task.shape, min(self.training.batch_size, 500))
        rule, online = self.rule(), self.training.online
        share = online if isinstance(online, float) else online / 100
        full = self.training.full_gradients or rule.needs.full_gradients
        passes = step * (1 if full else self.training.epochs)
        passes += forward * (rule.needs.losses + 5 * rule.needs.requery)
        evaluations = rounds / min(self.every, rounds)
        return rounds * share * self.task.train * passes + evaluations * self.task.test * forward

    def execute(self, job: Job, log: Log) -> None:
        """See the base class."""
        training = self.training
        data = self.task.federate(job.root, job.seed, training.batch_size)
        L.seed_everything(job.seed, verbose=False)
        module = fl.ClientModule(
            self.network(),
            optimizer=partial(
                torch.optim.SGD, lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
            ),
            lr_scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=training.decay),
            num_classes=self.classes,
        )
        going_on = job.checkpoint.is_file()
        if self.start is not None and not going_on:
            self.start(module, data)
        rule = self.rule()
        attack = None if self.attack is None else self.attack(job.seed)
        left_out = attack.clients if attack is not None and self.honest_only else ()
        strategy = fl.FederatedStrategy(
            rule,
            client=None if self.client is None else self.client(),
            clients_per_round=training.online,
            local_epochs=training.epochs,
            full_gradients=training.full_gradients,
            attack=attack,
            guard=None if self.guard is None else self.guard(),
            on_client_error="raise" if self.attack is None else "drop",
            seed=job.seed,
            loss_batch_size=LOSS_BATCH,
        )
        every = min(self.every, job.rounds)
        trainer = L.Trainer(
            max_epochs=job.rounds,
            strategy=strategy,
            accelerator=job.accelerator,
            devices=1,
            logger=False,
            callbacks=[LogRecorder(log, every, frozenset(left_out), partial(self.noted, rule) if self.noted else dict)],
            check_val_every_n_epoch=every,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data, ckpt_path=str(job.checkpoint) if going_on else None)
        if job.rounds % every:
            trainer.validate(module, data, verbose=False)
        if job.rounds >= self.rounds:
            job.checkpoint.unlink(missing_ok=True)


class LogRecorder(L.Callback):
    """Writes a line per evaluation, and a checkpoint after it; sums and time go on when the run is resumed.

    Args:
        log: where to.
        every: rounds from one checkpoint to the next.
        left_out: clients whose accuracies do not count.
        noted: gives more to write.
    """

    def __init__(
        self, log: Log, every: int, left_out: frozenset[int], noted: Callable[[], Mapping[str, float | list[float]]]
    ) -> None:
        self._log, self._every, self._left_out, self._noted = log, every, left_out, noted
        self._parent = os.getppid()
        self._seconds, self._began, self._rounds = 0.0, 0.0, 0
        self._sums: dict[str, float] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock; the state of a checkpoint has been loaded by now."""
        self._log.cut(self._rounds)
        self._began = time.perf_counter() - self._seconds

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Counts the round."""
        assert isinstance(trainer.strategy, fl.FederatedStrategy)
        record = trainer.strategy.last_round
        assert record is not None
        if record.round >= self._rounds:
            self._add(record)
        self._seconds = time.perf_counter() - self._began
        self._log.tick(self._rounds)
        if os.getppid() != self._parent:
            os._exit(1)  # whoever started this run is gone, and nobody hears
        if self._rounds % self._every == 0 or self._rounds == trainer.max_epochs:
            trainer.save_checkpoint(self._log.job.checkpoint, weights_only=False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the line."""
        assert isinstance(trainer.strategy, fl.FederatedStrategy)
        evaluation, record = trainer.strategy.last_evaluation, trainer.strategy.last_round
        assert evaluation is not None
        if record is not None and record.round >= self._rounds:  # validation comes before the end of the epoch
            self._add(record)
        metrics: dict[str, float | list[float]] = {}
        for name, values in evaluation.values.items():
            prefix = {"val_acc": "", "personal/val_acc": "personal_"}.get(name)
            if prefix is not None:
                counted = [k for k, client in enumerate(evaluation.client_ids) if client not in self._left_out]
                values = values[counted]
                summary = fairness_summary(values, evaluation.sizes[counted], True)
                metrics |= {f"{prefix}{key}": _short(summary[key]) for key in KEPT}
                values = values[~values.isnan()]  # of clients without test data
                metrics[f"{prefix}sample_std"] = _short(values.std()) if len(values) > 1 else 0.0
                if len(values) <= FEW:
                    metrics[f"{prefix}clients"] = [_short(value) for value in values]
        metrics |= self._noted()
        metrics |= {f"per_round_{key}": _short(value / self._rounds) for key, value in self._sums.items()}
        self._log.write(evaluation.round, metrics, time.perf_counter() - self._began)

    def _add(self, record: fl.RoundRecord) -> None:
        self._rounds = record.round + 1
        scalars = dict(record.scalars)
        numbers: dict[str, float] = {
            "conflicts": record.conflicts,
            "block_conflicts": sum(record.layer_conflicts.values()),  # unless FedLF counts its own blocks
            "merged": scalars.pop("merged_layers", 0) > 0,
            "flagged": record.flagged,
            "dropped": len(record.dropped),
            "step_norm": record.step_norm,
        }
        if len(record.layer_conflicts) <= 6:
            numbers |= {f"layer{i + 1}": count for i, count in enumerate(record.layer_conflicts.values())}
        for key, value in (numbers | scalars).items():
            self._sums[key] = self._sums.get(key, 0.0) + value

    def state_dict(self) -> dict[str, Any]:
        """Rounds, sums and time."""
        return {"rounds": self._rounds, "seconds": self._seconds, "sums": self._sums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from them."""
        self._rounds, self._seconds = state_dict["rounds"], state_dict["seconds"]
        self._sums = dict(state_dict["sums"])


def _short(value: float | Tensor) -> float:
    return float(f"{float(value):.5g}")
