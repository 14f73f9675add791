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

from fl_lightning._lightning import LightningModule, Trainer, lightning_module

if TYPE_CHECKING:
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
else:
    _result = lightning_module("trainer.connectors.logger_connector.result")
    _ResultCollection = _result._ResultCollection
    _ResultMetric = _result._ResultMetric


class QuickLog:
    """``self.log`` with a short path for the call that local steps repeat.

    Logging a mean once more with the same arguments goes straight to the stored metric: what Lightning checks on every
    call was checked the first time. Everything else goes to ``LightningModule.log``.

    Args:
        module: the module; its ``log`` is shadowed between :meth:`install` and :meth:`remove`.
        results: the collection that training logs into.
    """

    def __init__(self, module: LightningModule, results: _ResultCollection) -> None:
        self._module, self._results = module, results
        self._connector = module.trainer._logger_connector
        self._seen: dict[tuple[Any, ...], _ResultMetric] = {}
        self._log = type(module).log

    def install(self) -> None:
        """Shadows the module's ``log``."""
        self._module.__dict__["log"] = self

    def remove(self) -> None:
        """Gives the module its own ``log`` back."""
        self._module.__dict__.pop("log", None)

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`."""
        results, fx = self._results, self._module._current_fx_name
        call = (fx, name, args, *kwargs.items())
        try:
            metric = self._seen.get(call)
        except TypeError:  # an unhashable argument
            self._log(self._module, name, value, *args, **kwargs)
            return
        size = results.batch_size
        if (
            metric is not None
            and size is not None
            and self._connector._first_loop_iter is False
            and isinstance(value, Tensor)
            and value.numel() == 1
            and value.device == metric.value.device
        ):
            metric.forward(value.detach().reshape(()), size)
            metric.has_reset = False
            return
        self._log(self._module, name, value, *args, **kwargs)
        if args or "batch_size" in kwargs or kwargs.get("sync_dist") or kwargs.get("enable_graph"):
            return
        entry = results.get(f"{fx}.{name}")
        if entry is not None and entry.is_tensor and entry.meta.is_mean_reduction:
            self._seen[call] = entry


State = dict[str, Tensor | list[Tensor]]
_Merge = Callable[[Any, Any], Any]


def _add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def _rows(value: Tensor) -> Tensor:
    return value.reshape(1) if value.dim() == 0 else value


_MERGES: dict[Any, _Merge] = {
    dim_zero_sum: _add,
    dim_zero_max: torch.maximum,
    dim_zero_min: torch.minimum,
    dim_zero_cat: lambda a, b: a + b if isinstance(a, list) else torch.cat([_rows(a), _rows(b)]),
}


class MetricState:
    """The accumulated state of one torchmetrics metric, taken out so that a client can start from zero."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._state: State = read_state(metric)
        self._updates = metric._update_count

    @property
    def is_current(self) -> bool:
        """Whether the metric has been updated as often as when its state was taken."""
        return self._metric._update_count == self._updates

    def reset(self) -> None:
        """Empties the metric; what it had accumulated is kept here."""
        self._metric.reset()

    def put_back(self) -> None:
        """Gives the metric the saved state instead of what it has accumulated since."""
        write_state(self._metric, self._state, self._updates)

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
    """Whether two states of the metric can be joined exactly: not with custom reductions, nor if it wraps others."""
    if any(isinstance(module, Metric) for module in metric.modules() if module is not metric):
        return False
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
