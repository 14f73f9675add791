# SPDX-License-Identifier: Apache-2.0
"""Evaluates one model on every client's data, in an order that lets each client's values be told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from inspect import signature
from typing import Any, Protocol

from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.fit.evaluation.between_evaluations import Notices
from fl_lightning.fit.evaluation.client_evaluation import ClientEvaluation
from fl_lightning.fit.evaluation.loader import EvaluationLoader
from fl_lightning.fit.evaluation.personal import personal_evaluation
from fl_lightning.fit.evaluation.report import EvaluationReport
from fl_lightning.lightning.batches import untagged_batches, walked_loaders
from fl_lightning.lightning.names import Callback, LightningModule, Trainer, TrainerFn


class EvaluatedModel(Protocol):
    """The parameters that the module holds while it is evaluated."""

    @property
    def trained(self) -> Sequence[str] | None:
        """Names of the trained parameters; ``None`` before the first fit."""

    def show(self) -> None:
        """Binds the parameters that the method wants evaluated."""

    def put_back(self) -> None:
        """Binds the global parameters."""


class Evaluator:
    """Runs around every validation and test, whose hooks the state callback passes on.

    ``seed`` is the root of the random numbers that an evaluation draws. ``report`` tells users what was found, if
    anybody does. ``record`` is the last finished evaluation, ``None`` if it ran on data that is not divided among
    clients.
    """

    def __init__(
        self, model: EvaluatedModel, algorithm: ServerRule, client_rule: ClientRule, seed: int,
        report: EvaluationReport | None,
    ) -> None:  # fmt: skip
        self._model, self._algorithm, self._client_rule, self._seed = model, algorithm, client_rule, seed
        self._report, self._notices = report, Notices()
        self._running: ClientEvaluation | None = None
        self._finished: ClientEvaluation | None = None
        self._guard = ExitStack()
        self.record: EvaluationRecord | None = None

    def loader(
        self, module: LightningModule, stage: str, loaders: ClientLoaders, limit: int | float
    ) -> EvaluationLoader:
        """Walks over the clients' data of a stage; refuses a module that fetches batches itself."""
        step = module.validation_step if stage == "val" else module.test_step
        if "dataloader_iter" in signature(step).parameters:
            raise ValueError(f"{type(module).__name__}.{step.__name__} must take a batch, found dataloader_iter")
        return EvaluationLoader(loaders, limit)

    def begin(self, trainer: Trainer, stage: str, loaded: Mapping[str, Any] | None) -> None:
        """Binds the parameters to evaluate, and starts to collect if the data of the stage (val or test) is divided.

        ``loaded`` is the federated state of the checkpoint that the trainer function has loaded, if any.
        """
        # Validation inside a fit follows the round whose epoch is still open.
        rounds = trainer.current_epoch + int(trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking)
        self._guard.close()
        seed = derive_seed(self._seed, stage, rounds)
        self._guard.enter_context(isolated(seed, trainer.strategy.root_device))
        self._model.show()
        loaders = _divided_loaders(trainer)
        if loaders:
            layers, trained = self._algorithm.layers, self._model.trained
            personal = personal_evaluation(trainer, self._client_rule, loaded, layers, trained)
            ranks = trainer.strategy.ranks  # type: ignore[attr-defined]
            self._running = ClientEvaluation(trainer, loaders, stage, rounds, self._notices, personal, seed, ranks)
            self._guard.enter_context(self._running.listening())
            self._guard.enter_context(untagged_batches(trainer, self._running.begin, self._running.batch))
        elif not trainer.sanity_checking:
            self.record = None  # nobody may take an earlier one for this one's

    def end(self, trainer: Trainer, callback: Callback) -> None:
        """Keeps and reports what was collected, unless this was the sanity check."""
        if self._running is not None and not trainer.sanity_checking:
            self.record = self._running.record()
            if self._report is not None:
                self.record = self._report.oriented(self.record)
                self._report.log(self.record, trainer, callback)
            self._finished = self._running

    def remember(self) -> None:
        """The evaluation's last hook has run."""
        if self._finished is not None:
            self._finished.remember()
            self._finished = None

    def stop(self) -> None:
        """The evaluation is over or was cut short: the training parameters and the random state come back."""
        self._model.put_back()
        self._guard.close()
        self._running = None

    def print_table(self, trainer: Trainer) -> None:
        """Prints the per-client table of the last test."""
        if self._report is not None and self.record is not None and self.record.stage == "test":
            self._report.print_table(self.record, trainer)


def _divided_loaders(trainer: Trainer) -> list[EvaluationLoader | None]:
    """The loaders of the running evaluation, ``None`` for one whose data is not divided; empty if all are such.

    Of loaders that are walked side by side, the last whose data is divided.
    """
    walked, in_turn = walked_loaders(trainer)
    found = [one if isinstance(one, EvaluationLoader) else None for one in walked]
    last = [one for one in found if one is not None][-1:]
    return found if in_turn and last else [*last]
