# SPDX-License-Identifier: Apache-2.0
"""The accumulated state of a torchmetrics metric, taken out and put back."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

State = dict[str, Tensor | list[Tensor]]


_Merge = Callable[[Any, Any], Any]


def _rows(value: Tensor) -> Tensor:
    return value.reshape(1) if value.dim() == 0 else value


_MERGES: dict[Any, _Merge] = {
    dim_zero_sum: operator.add,
    dim_zero_max: torch.maximum,
    dim_zero_min: torch.minimum,
    dim_zero_cat: lambda a, b: a + b if isinstance(a, list) else torch.cat([_rows(a), _rows(b)]),
}


class MetricState:
    """The accumulated state of one torchmetrics metric, taken out so that a client can start from zero."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._state: State = read_state(metric)
        self.updates, self._value = metric._update_count, metric._forward_cache  # how many it has accumulated

    def put_back(self) -> None:
        """Gives the metric the saved state, or a copy of it, instead of what it has accumulated since."""
        write_state(self.metric, _copied(self._state), self.updates)
        self.metric._forward_cache = self._value

    def merge_back(self) -> None:
        """Adds the saved state to what the metric has accumulated since.

        torchmetrics' ``merge_state`` came with 1.6, refuses metrics of people's own that do not say
        ``full_state_update=False`` and all that look for the largest value, and weighs a mean as if one side were one
        update.
        """
        metric = self.metric
        since, updates = read_state(metric), metric._update_count
        for name, before in self._state.items():
            reduction = metric._reductions[name]
            if reduction is dim_zero_mean:
                total = self.updates + updates
                merged: Any = since[name]
                if self.updates:  # else it would be the same but for its last bits
                    merged = (self.updates * before + updates * merged) / total
            else:
                merged = _MERGES[reduction](before, since[name])
            setattr(metric, name, merged)
        metric._update_count = self.updates + updates
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


def _copied(state: State) -> State:
    """Tensors that updates change in place are copied; those in lists they leave alone."""
    return {
        name: [item.detach() if isinstance(item, Tensor) else item for item in value]
        if isinstance(value, list)
        else value.detach().clone()
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }


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


class MetricShare(NamedTuple):
    """What one client has added to an empty metric."""

    state: State
    updates: int  # how many
    value: Any  # what ``forward`` gave last; None if it was not called

    @classmethod
    def of(cls, metric: Metric) -> MetricShare:
        """What a metric holds; without graphs, and such that later updates do not reach it."""
        return cls(_copied(read_state(metric)), metric._update_count, metric._forward_cache)

    def add_to(self, metric: Metric) -> None:
        """Joins it with what the metric holds, which comes first."""
        before = MetricState(metric)
        if self.updates:
            write_state(metric, self.state, self.updates)
            before.merge_back()
        if self.value is not None:
            metric._forward_cache = self.value


def joins_clients(metric: Metric) -> bool:
    """Whether what clients add to empty metrics can be joined: the metric itself says so.

    Means of states, which torchmetrics weighs by updates, would round otherwise than in one metric. An update that
    asks for the full state is another one on an empty metric, unless it looks for the largest or the smallest value.
    """
    reductions = set(metric._reductions.values())
    looks_back = bool(metric.full_state_update) and not reductions <= {dim_zero_max, dim_zero_min}
    return is_mergeable(metric) and dim_zero_mean not in reductions and not looks_back


def updates_of(metric: Metric) -> int:
    """How often a metric and those that it wraps were updated since they were emptied."""
    return sum(part._update_count for part in metric.modules() if isinstance(part, Metric))


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
