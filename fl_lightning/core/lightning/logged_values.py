# SPDX-License-Identifier: Apache-2.0
"""Every client's own values of what ``self.log`` collects in an evaluation.

Reads Lightning's private result collection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.core.lightning.metric_state import MetricState, is_mergeable
from fl_lightning.core.lightning.names import Trainer, lightning_module

if TYPE_CHECKING:
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
else:
    _result = lightning_module("trainer.connectors.logger_connector.result")
    _ResultCollection = _result._ResultCollection
    _ResultMetric = _result._ResultMetric


class ClientValues:
    """Separates one client's logged values from those accumulated over all clients.

    ``begin`` puts the accumulated values aside, ``end`` reads the client's own values and adds them to what was put
    aside: per-client and pooled values both come out right, without touching the module.

    Args:
        results: the result collection of the running evaluation.
    """

    def __init__(self, results: _ResultCollection) -> None:
        self._results = results
        self._tensors: dict[str, tuple[Tensor, Tensor | None, int]] = {}
        self._metrics: list[MetricState] = []

    def begin(self) -> None:
        """Called before a client's first batch."""
        self._tensors, self._metrics = {}, []
        for key, entry in self._entries():
            if entry.is_tensor:
                self._tensors[key] = (entry.value, getattr(entry, "cumulated_batch_size", None), entry._update_count)
                entry.reset()
                entry.has_reset = False
        for metric in {id(e.value): e.value for _, e in self._entries() if not e.is_tensor}.values():
            if is_mergeable(metric):
                self._metrics.append(MetricState(metric))
        # Not before all are read: metrics of one compute group hold the same lists, which a reset empties in place.
        for state in self._metrics:
            state.reset()

    def end(self) -> dict[str, float]:
        """Called after a client's last batch; returns the client's values by logged name."""
        values: dict[str, float] = {}
        for key, entry in self._entries():
            value = self._read(entry)
            if value is not None and value.numel() == 1:
                values[entry.meta.name] = float(value)
            if entry.is_tensor and key in self._tensors:
                self._merge_tensor(entry, *self._tensors[key])
        for state in self._metrics:
            state.merge_back()
        return values

    def _entries(self) -> Iterable[tuple[str, Any]]:
        return [(k, e) for k, e in self._results.items() if e.meta.on_epoch and not e.has_reset]

    def _read(self, entry: _ResultMetric) -> Tensor | None:
        if entry.is_tensor:
            if entry._update_count == 0:
                return None
            total: Tensor = entry.value
            return total / entry.cumulated_batch_size if entry.meta.is_mean_reduction else total
        metric = entry.value
        if not isinstance(metric, Metric) or metric._update_count == 0 or not is_mergeable(metric):
            return None
        computed = metric.compute()
        metric._computed = None
        return computed if isinstance(computed, Tensor) else None

    @staticmethod
    def _merge_tensor(entry: _ResultMetric, value: Tensor, size: Tensor | None, updates: int) -> None:
        meta = entry.meta
        if size is not None:
            entry.value = value + entry.value
            entry.cumulated_batch_size = entry.cumulated_batch_size + size
        elif meta.is_sum_reduction:
            entry.value = value + entry.value
        else:
            entry.value = (
                torch.maximum(value, entry.value) if meta.is_max_reduction else torch.minimum(value, entry.value)
            )
        entry._update_count += updates
        entry._computed = None


def active_results(trainer: Trainer) -> _ResultCollection:
    """The result collection that ``self.log`` writes to right now."""
    results = trainer._results
    assert results is not None
    return results


def send_to_loggers(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Writes numbers to every logger at the current step, beside ``self.log``."""
    values: dict[str, Any] = dict(metrics)
    trainer._logger_connector.log_metrics(values)


def show_in_progress_bar(trainer: Trainer, values: Mapping[str, float | str]) -> None:
    """Makes values available to progress bars, beside ``self.log``."""
    trainer._logger_connector._progress_bar_metrics.update(values)  # type: ignore[arg-type]
