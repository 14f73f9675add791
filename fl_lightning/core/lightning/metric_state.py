# SPDX-License-Identifier: Apache-2.0
"""The accumulated state of a torchmetrics metric, taken out and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

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
    """Whether two states of the metric can be joined exactly.

    Not with custom reductions, nor if it wraps others, nor with a ``reset`` of its own: that may be about more than its
    states.
    """
    if type(metric).reset is not Metric.reset:
        return False
    if any(isinstance(module, Metric) for module in metric.modules() if module is not metric):
        return False
    return all(reduction is dim_zero_mean or reduction in _MERGES for reduction in metric._reductions.values())


def beside_states(metric: Metric) -> dict[str, Any]:
    """What a metric keeps in plain attributes beside states that can be joined, for which there is no such rule."""
    states = metric._defaults if is_mergeable(metric) else ()
    return {k: v for k, v in vars(metric).items() if k not in states and k not in _METRIC}


class _Empty(Metric):
    def update(self) -> None:
        """Nothing."""

    def compute(self) -> None:
        """Nothing."""


_METRIC = frozenset(vars(_Empty()))


class MetricUpdate(NamedTuple):
    """What happened to a metric in another process.

    Attributes:
        name: the metric.
        state: what was added to it; ``None``: it was emptied.
        updates: by how many updates.
    """

    name: str
    state: State | None
    updates: int = 0

    def repeat(self, metric: Metric) -> None:
        """Lets it happen here."""
        if self.state is None:
            metric.reset()
            return
        before = MetricState(metric)
        write_state(metric, self.state, self.updates)
        before.merge_back()


class MetricRecorder:
    """Notes what is added to a metric, so that it can be added elsewhere, with the same bits.

    The metric itself is empty when a client begins. Sums of floats depend on the order in which they are added up, so
    each update is noted by itself; sums of integers, extremes and lists are one entry. Nobody may see what the metric
    has added up: it is not what it is where the entries go. Takes the places of the metric's methods for good.

    Args:
        name: what the metric is called in entries.
        metric: the metric; :meth:`can_record` says of which.
        journal: takes the entries in their order.
    """

    def __init__(self, name: str, metric: Metric, journal: list[MetricUpdate]) -> None:
        self._name, self._metric, self._journal = name, metric, journal
        self._update, self._forward = metric.update, metric.forward
        self._reset, self._compute = metric.reset, metric.compute
        self._each = any(default.dtype.is_floating_point or default.dtype.is_complex for default in _sums(metric))
        self._in_forward = False
        self._since: State = {}
        self.read = False
        vars(metric).update(update=self.update, forward=self.forward, reset=self.reset, compute=self.compute)
        self._reset()

    @staticmethod
    def can_record(metric: Metric) -> bool:
        """Whether what is added to the metric can be told from what it held."""
        return is_mergeable(metric) and dim_zero_mean not in metric._reductions.values()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As ever, noted."""
        if not self._each:
            self._update(*args, **kwargs)
            return
        if self._in_forward:
            self._update(*args, **kwargs)
            self._since = read_state(self._metric)  # forward's last update is the one of the batch alone
            return
        self._reset()
        try:
            self._update(*args, **kwargs)
        finally:
            self._note(read_state(self._metric), 1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, noted."""
        self._in_forward, self._since = True, {}
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._in_forward = False
            if self._each and self._since:
                self._note(self._since, 1)

    def reset(self) -> None:
        """As ever, noted."""
        self._reset()
        if not self._in_forward:
            self._journal.append(MetricUpdate(self._name, None))

    def compute(self) -> Any:
        """As ever; outside ``forward`` it is noted that somebody sees what the metric has added up."""
        self.read = self.read or not self._in_forward
        return self._compute()

    def _note(self, state: State, updates: int) -> None:
        state = {k: [t.detach() for t in v] if isinstance(v, list) else v.detach() for k, v in state.items()}
        self._journal.append(MetricUpdate(self._name, state, updates))

    def end(self) -> Any:
        """Puts what is not noted yet into the journal, and empties the metric.

        Returns:
            What ``forward`` gave last; ``None`` if it was not called.
        """
        metric = self._metric
        updates, value = metric._update_count, metric._forward_cache
        if updates and not self._each:
            self._note(read_state(metric), updates)
        if updates or value is not None:
            self._reset()
        self.read = False
        return value


def _sums(metric: Metric) -> list[Tensor]:
    defaults = metric._defaults
    summed = [defaults[name] for name, reduction in metric._reductions.items() if reduction is dim_zero_sum]
    return [default for default in summed if isinstance(default, Tensor)]
