# SPDX-License-Identifier: Apache-2.0
"""Evaluates one model on every client's data, in an order that lets each client's values be told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor

from fl_lightning._lightning import Callback, Trainer, rank_zero_warn
from fl_lightning.callbacks.client_table import ClientTable, format_client_table
from fl_lightning.data.loaders import ClientLoaders
from fl_lightning.epoch_end import EpochEnd
from fl_lightning.local_plan import LocalPlan
from fl_lightning.metrics.functional import fairness_summary, is_larger_better
from fl_lightning.personal import PersonalEvaluation
from fl_lightning.records import EvaluationRecord
from fl_lightning.results import ClientValues, active_results, send_to_loggers

_MANY_CLIENTS = 200


@dataclass(frozen=True)
class Cursor:
    """Where in the clients' data the last batch came from."""

    client_id: int
    is_first: bool
    is_last: bool
    num_samples: int


class EvaluationLoader:
    """Walks over all clients' batches in client order.

    One loader, not a list of them: a list would make Lightning demand a ``dataloader_idx`` argument and rename every
    metric.

    Args:
        loaders: the clients' evaluation data.
        limit: batches per client, a count or a fraction.
    """

    def __init__(self, loaders: ClientLoaders, limit: int | float) -> None:
        self.loaders = loaders
        plan = LocalPlan(epochs=1, steps=None, limit=limit, seed=0)
        self._counts = [plan.batches(loaders.num_batches(client)) for client in range(len(loaders))]
        self.cursor: Cursor | None = None

    def __len__(self) -> int:
        return sum(self._counts)

    def of_client(self, client_id: int) -> Iterator[tuple[Any, int]]:
        """The client's batches alone, with their numbers of samples."""
        return islice(self.loaders.batches(client_id, seed=None), self._counts[client_id])

    def __iter__(self) -> Iterator[Any]:
        for client, count in enumerate(self._counts):
            for index, (batch, size) in enumerate(self.of_client(client)):
                self.cursor = Cursor(client, index == 0, index + 1 == count, size)
                yield batch


class ClientEvaluation:
    """Collects per-client values while an evaluation runs.

    Args:
        loader: the loader that is being walked.
        results: Lightning's result collection of the running evaluation.
        stage: ``"val"`` or ``"test"``.
        round: rounds finished.
        personal: evaluates clients' own models as well, where the method has them.
        ending: runs the module's epoch-end hook for each client, where it has one.
    """

    def __init__(
        self,
        loader: EvaluationLoader,
        results: Any,
        stage: str,
        round: int,  # noqa: A002
        personal: PersonalEvaluation | None = None,
        ending: EpochEnd | None = None,
    ) -> None:
        self._loader, self._stage, self._round, self._personal = loader, stage, round, personal
        self._ending = ending
        self._values = ClientValues(results)
        self._clients: list[int] = []
        self._sizes: list[int] = []
        self._rows: list[dict[str, float]] = []
        self._samples = 0

    def before_step(self) -> None:
        """Called before the module sees a batch."""
        cursor = self._loader.cursor
        if cursor is not None and cursor.is_first:
            self._values.begin()
            if self._ending is not None:
                self._ending.begin()
            self._samples = 0

    def after_step(self) -> None:
        """Called after the module saw a batch."""
        cursor = self._loader.cursor
        if cursor is None:
            return
        self._samples += cursor.num_samples
        if cursor.is_last:
            self._clients.append(cursor.client_id)
            self._sizes.append(self._samples)
            late = {} if self._ending is None else self._ending.values()
            row, client = {**late, **self._values.end()}, cursor.client_id
            if self._ending is not None:
                self._ending.end()
            if self._personal is not None:
                row |= self._personal.values(client, self._loader.of_client(client))
            self._rows.append(row)

    def record(self) -> EvaluationRecord:
        """What was collected; a metric that a client did not log is NaN for it."""
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        values = {n: torch.tensor([row.get(n, nan) for row in self._rows], dtype=torch.float64) for n in names}
        sizes = torch.tensor(self._sizes, dtype=torch.int64)
        return EvaluationRecord(self._round, self._stage, tuple(self._clients), sizes, values)


def evaluation_metrics(
    record: EvaluationRecord, fairness_metric: str | None, larger_is_better: bool
) -> dict[str, float]:
    """Summary numbers of an evaluation under the names of docs/logged.md.

    Args:
        record: the per-client values.
        fairness_metric: metric whose direction is ``larger_is_better``; the others' direction follows from their names.
        larger_is_better: direction of ``fairness_metric``.
    """
    metrics: dict[str, float] = {}
    for name, values in record.values.items():
        larger = larger_is_better if name == fairness_metric else is_larger_better(name)
        metrics |= {f"fed/{name}/{key}": float(v) for key, v in _summary(values, record.sizes, larger).items()}
    return metrics


def _summary(values: Tensor, sizes: Tensor, larger: bool) -> Mapping[str, Tensor]:
    return fairness_summary(values, sizes, larger_is_better=larger)


def shown_angle(record: EvaluationRecord, metrics: Mapping[str, float], fairness_metric: str | None) -> float | None:
    """The fairness angle for the progress bar: that of ``fairness_metric``, else of the first metric that has one."""
    names = [fairness_metric] if fairness_metric is not None else list(record.values)
    angles = (metrics.get(f"fed/{name}/angle", nan) for name in names)
    return next((angle for angle in angles if not isnan(angle)), None)


def client_metrics(record: EvaluationRecord) -> dict[str, float]:
    """Every client's values under ``fed/<metric>/client/<id>``."""
    return {
        f"fed/{name}/client/{client}": float(value)
        for name, values in record.values.items()
        for client, value in zip(record.client_ids, values, strict=True)
    }


class FairnessWatch:
    """Watches validations and tests client by client, and logs how evenly the clients fare.

    Args:
        metric: the metric whose direction and angle are of interest; ``None``: see :func:`shown_angle`.
        larger_is_better: the direction of ``metric``.

    Attributes:
        record: the last finished evaluation.
    """

    def __init__(self, metric: str | None, larger_is_better: bool) -> None:
        self._metric, self._larger_is_better, self._looked_for = metric, larger_is_better, False
        self._loaders: dict[str, EvaluationLoader] = {}
        self._running: ClientEvaluation | None = None
        self.record: EvaluationRecord | None = None

    def loader(self, stage: str, loaders: ClientLoaders, limit: int | float) -> EvaluationLoader:
        """Walks over the clients' data of a stage and remembers that it does."""
        self._loaders[stage] = EvaluationLoader(loaders, limit)
        return self._loaders[stage]

    def forget_loaders(self) -> None:
        """The trainer function is over."""
        self._loaders = {}

    def begin(
        self, trainer: Trainer, stage: str, rounds: int, personal: Callable[[], PersonalEvaluation] | None = None
    ) -> None:
        """Starts to collect if the stage's data is divided among clients.

        Args:
            trainer: the trainer.
            stage: ``"val"`` or ``"test"``.
            rounds: rounds finished.
            personal: makes what evaluates clients' own models as well.
        """
        loader = self._loaders.get(stage)
        if loader is not None:
            own = None if personal is None or trainer.sanity_checking else personal()
            ending = EpochEnd.of(trainer, stage)
            self._running = ClientEvaluation(loader, active_results(trainer), stage, rounds, own, ending)
        elif not trainer.sanity_checking:
            self.record = None  # nobody may take an earlier one for this one's

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Around the module's step on one batch."""
        if self._running is not None:
            self._running.before_step()
        yield
        if self._running is not None:
            self._running.after_step()

    def end(self, trainer: Trainer, callback: Callback) -> float | None:
        """Logs what was collected, unless this was the sanity check; returns the angle for the progress bar."""
        if self._running is None or trainer.sanity_checking:
            return None
        self.record = record = self._running.record()
        self._look_for_metric(record)
        metrics = evaluation_metrics(record, self._metric, self._larger_is_better)
        for name, value in metrics.items():
            callback.log(name, value)  # type: ignore[attr-defined]
        if len(record.client_ids) <= _MANY_CLIENTS:
            send_to_loggers(trainer, client_metrics(record))
        return shown_angle(record, metrics, self._metric)

    def _look_for_metric(self, record: EvaluationRecord) -> None:
        """Warns in the first validation if nobody logs ``fairness_metric``."""
        if self._metric is None or self._looked_for or record.stage != "val":
            return
        self._looked_for = True
        if self._metric not in record.values:
            rank_zero_warn(
                f"fairness_metric must be a metric that validation logs per client, found {self._metric!r}: the "
                f"progress bar shows no angle; there are {', '.join(map(repr, record.values)) or 'none'}"
            )

    def stop(self) -> None:
        """The evaluation is over, or was cut short."""
        self._running = None

    def print_table(self, trainer: Trainer) -> None:
        """Prints the per-client table of the last test, unless a ClientTable callback does."""
        tables = [c for c in trainer.callbacks if isinstance(c, ClientTable)]  # type: ignore[attr-defined]
        if self.record is not None and self.record.stage == "test" and not tables:
            larger = {} if self._metric is None else {self._metric: self._larger_is_better}
            trainer.print(format_client_table(self.record, larger_is_better=larger))
