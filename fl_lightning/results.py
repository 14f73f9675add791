# SPDX-License-Identifier: Apache-2.0
"""Access to what ``self.log`` collects: cheap logging per local step, and every client's own metric values.

With :mod:`fl_lightning.loop` this is the only file that touches Lightning's private classes; the contract test covers
what both rely on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from fl_lightning._lightning import Trainer, lightning_module

if TYPE_CHECKING:
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
else:
    _result = lightning_module("trainer.connectors.logger_connector.result")
    _ResultCollection = _result._ResultCollection
    _ResultMetric = _result._ResultMetric


class ClientResults(_ResultCollection):
    """Lightning's result collection with a short path for the call that local steps repeat.

    Logging a mean of tensors a second time with the same arguments skips rebuilding the metadata and moving the stored
    metric to the device it is on, which is most of what ``self.log`` costs. Everything else goes Lightning's way.
    """

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`."""
        metric = self.get(f"{fx}.{name}")
        if metric is not None and not args and self.dataloader_idx is None and isinstance(value, Tensor):
            size = kwargs.get("batch_size") or self.batch_size
            if size is not None and _repeats(metric, value, kwargs):
                metric.forward(value.detach(), size)
                metric.has_reset = False
                return
        super().log(fx, name, value, *args, **kwargs)


def _repeats(metric: _ResultMetric, value: Tensor, kwargs: dict[str, Any]) -> bool:
    meta = metric.meta
    return bool(
        metric.is_tensor
        and meta.is_mean_reduction
        and value.device == metric.value.device
        and kwargs.get("on_step", False) == meta.on_step
        and kwargs.get("on_epoch", True) == meta.on_epoch
        and kwargs.get("prog_bar", False) == meta.prog_bar
        and kwargs.get("logger", True) == meta.logger
        and kwargs.get("reduce_fx", torch.mean) in ("mean", torch.mean)
        and not kwargs.get("enable_graph", False)
        and not kwargs.get("sync_dist", False)
    )


State = dict[str, Tensor | list[Tensor]]
_Merge = Callable[[Any, Any], Any]


def _add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


_MERGES: dict[Any, _Merge] = {
    dim_zero_sum: _add,
    dim_zero_max: torch.maximum,
    dim_zero_min: torch.minimum,
    dim_zero_cat: lambda a, b: a + b if isinstance(a, list) else torch.cat([torch.atleast_1d(a), torch.atleast_1d(b)]),
}


class MetricState:
    """The accumulated state of one torchmetrics metric, taken out so that a client can start from zero."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._state: State = read_state(metric)
        self._updates = metric._update_count
        metric.reset()

    def merge_back(self) -> None:
        """Adds the saved state to what the metric has accumulated since."""
        metric = self._metric
        since, updates = read_state(metric), metric._update_count
        for name, before in self._state.items():
            reduction = metric._reductions[name]
            if reduction is dim_zero_mean:
                total = max(self._updates + updates, 1)
                merged: Any = (self._updates * before + updates * since[name]) / total  # type: ignore[operator]
            else:
                merged = _MERGES[reduction](before, since[name])
            setattr(metric, name, merged)
        metric._update_count = self._updates + updates
        metric._computed = None


def read_state(metric: Metric) -> State:
    """References to a metric's states; list states are copied because ``reset`` empties them in place."""
    state: State = {}
    for name in metric._defaults:
        value = getattr(metric, name)
        state[name] = list(value) if isinstance(value, list) else value
    return state


def write_state(metric: Metric, state: State, updates: int) -> None:
    """Puts back what :func:`read_state` returned."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count = updates
    metric._computed = None


def is_mergeable(metric: Metric) -> bool:
    """Whether two states of the metric can be joined exactly; custom reductions cannot."""
    return all(reduction is dim_zero_mean or reduction in _MERGES for reduction in metric._reductions.values())


class ClientValues:
    """Separates one client's logged values from those accumulated over all clients.

    ``begin`` puts the accumulated values aside, ``end`` reads the client's own values and adds them to what was put
    aside: per-client and pooled values both come out right, without touching the module.

    Args:
        results: the result collection of the running evaluation.
    """

    def __init__(self, results: _ResultCollection) -> None:
        self._results = results
        self._tensors: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._metrics: list[MetricState] = []

    def begin(self) -> None:
        """Called before a client's first batch."""
        self._tensors, self._metrics = {}, []
        for key, entry in self._entries():
            if entry.is_tensor:
                self._tensors[key] = (entry.value, getattr(entry, "cumulated_batch_size", None))
                entry.reset()
                entry.has_reset = False
        for metric in {id(e.value): e.value for _, e in self._entries() if not e.is_tensor}.values():
            if is_mergeable(metric):
                self._metrics.append(MetricState(metric))

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
            if not entry.meta.is_mean_reduction:
                return entry.value if bool(torch.isfinite(entry.value)) else None
            return entry.value / entry.cumulated_batch_size if int(entry.cumulated_batch_size) > 0 else None
        metric = entry.value
        if not isinstance(metric, Metric) or metric._update_count == 0 or not is_mergeable(metric):
            return None
        computed = metric.compute()
        metric._computed = None
        return computed if isinstance(computed, Tensor) else None

    @staticmethod
    def _merge_tensor(entry: _ResultMetric, value: Tensor, size: Tensor | None) -> None:
        meta = entry.meta
        if meta.is_mean_reduction:
            entry.value = value + entry.value
            entry.cumulated_batch_size = entry.cumulated_batch_size + size
        elif meta.is_sum_reduction:
            entry.value = value + entry.value
        else:
            entry.value = torch.maximum(value, entry.value) if meta.is_max_reduction else torch.minimum(value, entry.value)
        entry._computed = None


def active_results(trainer: Trainer) -> _ResultCollection:
    """The result collection that ``self.log`` writes to right now."""
    results = trainer._results
    assert results is not None
    return results


def send_to_loggers(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Writes numbers to every logger at the current step, beside ``self.log``."""
    trainer._logger_connector.log_metrics(dict(metrics))
