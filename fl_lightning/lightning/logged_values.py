# SPDX-License-Identifier: Apache-2.0
"""What an evaluation logs: every client's own values, from Lightning's private results, and what else loggers get."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.lightning.metric_state import gives_one_class, is_mergeable, updates_of
from fl_lightning.lightning.names import ResultCollection, ResultMetric, Trainer, lightning_module
from fl_lightning.lightning.undefined_metrics import LogNotes

if TYPE_CHECKING:
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync
else:
    _Sync = lightning_module("trainer.connectors.logger_connector.result")._Sync

ClientLogs = dict[str, tuple[dict[str, Any], Tensor, Tensor | None, int]]
"""What a client adds under each key of Lightning's results: its options, the value, its weight and its updates."""


@dataclass
class LoggedRow:
    """One client's values by logged name, and what is known about them."""

    values: dict[str, float] = field(default_factory=dict)  # NaN where a metric is undefined for this client
    undefined: dict[str, str] = field(default_factory=dict)  # why, for each name whose value is NaN
    larger_is_better: dict[str, bool] = field(default_factory=dict)  # of the metrics that say so
    one_class: set[str] = field(default_factory=set)  # metrics in which all samples got one class, wrongly
    error: str | None = None  # what the module's hook raised, if it did not come to its end

    def add(self, name: str, value: float, reason: str | None = None) -> None:
        """Keeps a number."""
        self.values[name] = nan if reason is not None else value
        self.undefined.pop(name, None)
        if isnan(self.values[name]):
            self.undefined[name] = reason or "it is NaN"

    def note(self, name: str, metric: Metric) -> None:
        """Keeps which end of a metric is good, if its class says so, and whether all samples got one class."""
        better = getattr(metric, "higher_is_better", None)
        if isinstance(better, bool):
            self.larger_is_better[name] = better
        if gives_one_class(metric):
            self.one_class.add(name)

    def update(self, other: LoggedRow, prefix: str = "") -> None:
        """Takes over what another row holds, under longer names if asked for."""
        self.values.update({prefix + name: value for name, value in other.values.items()})
        self.undefined.update({prefix + name: reason for name, reason in other.undefined.items()})
        self.one_class.update(prefix + name for name in other.one_class)
        self.larger_is_better.update({prefix + name: better for name, better in other.larger_is_better.items()})


class ClientValues:
    """One client's logged values in the results of an evaluation.

    Between :meth:`clear` and :meth:`take` the results hold the values of one client; :meth:`join` lets them hold those
    of several. Results of a loader that is over stay as they are.
    """

    def __init__(self, results: ResultCollection) -> None:
        self.results = results
        self._metrics: set[str] = set()  # keys of metric objects that some client has logged
        self._metas: dict[str, dict[str, Any]] = {}

    def clear(self) -> None:
        """Empties the results; metric objects keep their states."""
        for key, entry in self._entries():
            if entry.is_tensor:
                entry.reset()
            else:
                self._metrics.add(key)
            entry.has_reset, entry._computed = True, None

    def read(self, notes: LogNotes, row: LoggedRow) -> None:
        """Adds the values of what the results hold to a row."""
        for _, entry in self._entries():
            value, reason = _value(entry, notes)
            if value is not None and value.numel() == 1:
                name, own = self.results._forked_name(entry, False)[0], entry.meta.name
                row.add(name, float(value), reason or notes.undefined.get(own))
                source = notes.sources.get(own) if entry.is_tensor else entry.value
                if source is not None:
                    row.note(name, source)

    def take(self, notes: LogNotes, row: LoggedRow) -> ClientLogs:
        """What the client's batches have logged, beside metric objects; its values are added to the row."""
        self.read(notes, row)
        entries = [(key, entry) for key, entry in self._entries() if entry.is_tensor and entry._update_count]
        self._metas |= {key: _portable(entry.meta) for key, entry in entries if key not in self._metas}
        return {
            key: (self._metas[key], e.value.clone(), getattr(e, "cumulated_batch_size", None), int(e._update_count))
            for key, e in entries
        }

    def join(self, logs: Iterable[ClientLogs], means: Mapping[str, float]) -> list[str]:
        """Lets the results hold what some clients have logged, in their order, and nothing else.

        A logged metric object that cannot be joined has the value in ``means``. Returns the names of these.
        """
        self.clear()
        for one in logs:
            for key, (meta, value, size, updates) in one.items():
                if key not in self.results:  # the clients of this process do not log it
                    sync = next((e.meta.sync.fn for e in self.results.values()), _Sync.no_op)
                    self.results.log(value=value, batch_size=1, sync_dist_fn=sync, **meta)
                    self.results[key].reset()
                entry = self.results[key]
                if entry.has_reset:
                    entry.value, entry._update_count, entry.has_reset = value, updates, False
                    if size is not None:
                        entry.cumulated_batch_size = size
                else:
                    self._merge_tensor(entry, value, size, updates)
        found = []
        for entry in map(self.results.__getitem__, self._metrics):
            entry.has_reset = entry.meta.dataloader_idx != self.results.dataloader_idx
            name = self.results._forked_name(entry, False)[0]
            if name in means and not is_mergeable(entry.value):
                entry._computed = torch.tensor(means[name], device=entry.value.device)
                found.append(name)
        return found

    def _entries(self) -> Iterable[tuple[str, Any]]:
        return [(key, entry) for key, entry in self.results.valid_items() if entry.meta.on_epoch]

    @staticmethod
    def _merge_tensor(entry: ResultMetric, value: Tensor, size: Tensor | None, updates: int) -> None:
        meta = entry.meta
        if size is not None:
            entry.cumulated_batch_size = entry.cumulated_batch_size + size
        if size is not None or meta.is_sum_reduction:
            entry.value = entry.value + value
        else:
            entry.value = (
                torch.maximum(entry.value, value) if meta.is_max_reduction else torch.minimum(entry.value, value)
            )
        entry._update_count += updates


def _value(entry: ResultMetric, notes: LogNotes) -> tuple[Tensor | None, str | None]:
    """Of an entry, NaN where it is undefined, and why; nothing if nothing was logged."""
    if entry.is_tensor:
        total: Tensor = entry.value
        if entry._update_count == 0:
            return None, None
        return total / entry.cumulated_batch_size if entry.meta.is_mean_reduction else total, None
    metric = entry.value
    if not isinstance(metric, Metric) or updates_of(metric) == 0:
        return None, None
    computed, reason = notes.computed(metric)
    return computed if isinstance(computed, Tensor) else None, reason


def _portable(meta: Any) -> dict[str, Any]:
    """The arguments of ``self.log`` as another process takes them."""
    given = {option.name: getattr(meta, option.name) for option in fields(meta)}
    for own in ("_sync", "dataloader_idx"):
        del given[own]
    return {**given, "sync_dist": bool(meta.sync._should)}


@contextmanager
def collecting(
    trainer: Trainer, results: ResultCollection, shown: Mapping[str, float], in_steps: bool
) -> Iterator[None]:
    """``self.log`` writes to these results, and ``trainer.callback_metrics`` and its like know nothing else.

    Beside ``shown``, a client's values, and those of training. ``in_steps``: more than one hook logs.
    """
    connector: Any = trainer._logger_connector
    loop: Any = trainer._active_loop
    training: Any = trainer.fit_loop.epoch_loop._results
    names = {entry.meta.name + end for entry in training.values() for end in ("", "_step", "_epoch")}
    own = {name: torch.tensor(value) for name, value in shown.items()}
    before, outer = dict(vars(connector)), loop._results
    for at in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics"):
        setattr(connector, at, {name: value for name, value in before[at].items() if name in names} | own)
    loop._results, connector._first_loop_iter = results, False if in_steps else None
    try:
        yield
    finally:
        loop._results = outer
        vars(connector).update(before)


def active_results(trainer: Trainer) -> ResultCollection:
    """The result collection that ``self.log`` writes to right now."""
    results = trainer._results
    assert results is not None
    return results


def publish(trainer: Trainer, metrics: Mapping[str, float], bar: Mapping[str, float]) -> None:
    """Writes numbers to every logger at the current step, and shows some in progress bars, beside ``self.log``."""
    connector: Any = trainer._logger_connector
    if metrics:
        connector.log_metrics(dict(metrics))
    connector._progress_bar_metrics.update(bar)


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
