# SPDX-License-Identifier: Apache-2.0
"""The accumulated state of a torchmetrics metric, taken out and put back; the private names of torchmetrics."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torchmetrics import Metric, classification
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum, prints
from torchmetrics.wrappers import ClasswiseWrapper, MultioutputWrapper, MultitaskWrapper, Running

from fl_lightning.core.modules import submodules
from fl_lightning.metrics.by_group import ByGroup

CONTRACT = ("_computed", "_defaults", "_forward_cache", "_reductions", "_should_unsync", "_update_count")
"""Private attributes of metrics in use. Files outside this room, but for ``metrics/client.py``, ask functions here."""

State = dict[str, Tensor | list[Tensor] | int]

_HOLDERS = (ByGroup, ClasswiseWrapper, MultioutputWrapper, MultitaskWrapper)
"""Wrappers that accumulate nothing beside what the metrics in them do."""

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
        self.updates, self._value = updates_of(metric), metric._forward_cache  # how many it has accumulated

    def restore(self) -> None:
        """Gives the metric the saved state, or a copy of it, instead of what it has accumulated since."""
        write_state(self.metric, _copied(self._state), self.updates)
        self.metric._forward_cache = self._value


class _Slot(NamedTuple):
    """Where a metric accumulates something."""

    owner: Metric
    name: str
    reduction: Any
    default: Tensor | list[Tensor] | int


def _slots(metric: Metric) -> dict[str, _Slot]:
    slots: dict[str, _Slot] = {}
    for at, part in parts_of(metric):
        prefix = f"{at}." if at else ""
        slots |= {prefix + n: _Slot(part, n, part._reductions[n], v) for n, v in part._defaults.items()}
        if at:  # the metric's own count is apart
            slots[f"{prefix}_update_count"] = _Slot(part, "_update_count", dim_zero_sum, 0)
    return slots


def parts_of(metric: Metric) -> list[tuple[str, Metric]]:
    """The metric, and those in it if it accumulates nothing beside them."""
    found = submodules(metric) if isinstance(metric, _HOLDERS) else [("", metric)]
    return [(name, part) for name, part in found if isinstance(part, Metric)]


def read_state(metric: Metric) -> State:
    """References to a metric's states; list states are copied because ``reset`` empties them in place."""
    state: State = {}
    for name, slot in _slots(metric).items():
        value = getattr(slot.owner, slot.name)
        state[name] = list(value) if isinstance(value, list) else value
    return state


def write_state(metric: Metric, state: State, updates: int) -> None:
    """Puts back what :func:`read_state` returned."""
    slots = _slots(metric)
    for name, value in state.items():
        setattr(slots[name].owner, slots[name].name, value)
    if not isinstance(metric, _HOLDERS):  # torchmetrics counts in the metrics that they hold
        metric._update_count = updates
    for _, part in parts_of(metric):
        part._computed = None


def defaults_of(metric: Metric) -> State:
    """What its states are when it is empty."""
    return {name: slot.default for name, slot in _slots(metric).items()}


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

    Not with custom reductions, nor if it wraps others and keeps more than these, nor with a ``reset`` of its own: that
    may be about more than its states.
    """
    means = () if isinstance(metric, _HOLDERS) else (dim_zero_mean,)
    return all(isinstance(part, _HOLDERS) or _is_plain(part, (*_MERGES, *means)) for _, part in parts_of(metric))


def _is_plain(metric: Metric, reductions: tuple[Any, ...]) -> bool:
    if type(metric).reset is not Metric.reset or not all(r in reductions for r in metric._reductions.values()):
        return False
    return not any(isinstance(part, Metric) for _, part in submodules(metric)[1:])


class MetricDelta(NamedTuple):
    """What one client has added to an empty metric."""

    state: State
    updates: int  # how many
    value: Any  # what ``forward`` gave last; None if it was not called

    @classmethod
    def of(cls, metric: Metric) -> MetricDelta:
        """What a metric holds; without graphs, and such that later updates do not reach it."""
        return cls(_copied(read_state(metric)), updates_of(metric), metric._forward_cache)

    def put_in(self, metric: Metric) -> None:
        """Lets the metric hold nothing else."""
        write_state(metric, _copied(self.state), self.updates)
        metric._forward_cache = self.value

    def add_to(self, metric: Metric) -> None:
        """Joins it with what the metric holds, which comes first.

        torchmetrics' ``merge_state`` came with 1.6, refuses metrics of people's own that do not say
        ``full_state_update=False`` and all that look for the largest value, and weighs a mean as if one side were one
        update.
        """
        updates, held, merged = updates_of(metric), read_state(metric), State(self.state)
        for name, slot in _slots(metric).items() if self.updates else ():
            before, own = cast("Any", held[name]), cast("Any", self.state[name])
            if slot.reduction is not dim_zero_mean:
                merged[name] = _MERGES[slot.reduction](before, own)
            elif updates:  # else it would be the same but for its last bits
                merged[name] = (updates * before + self.updates * own) / (updates + self.updates)
        if self.updates:
            write_state(metric, merged, updates + self.updates)
        if self.value is not None:
            metric._forward_cache = self.value


def joins_clients(metric: Metric) -> bool:
    """Whether what clients add to empty metrics can be joined: the metric itself says so.

    Means of states, which torchmetrics weighs by updates, would round otherwise than in one metric. An update that
    asks for the full state is another one on an empty metric, unless it looks for the largest or the smallest value.
    """
    for _, part in parts_of(metric):
        reductions = set(part._reductions.values())
        looks_back = bool(part.full_state_update) and not reductions <= {dim_zero_max, dim_zero_min}
        if dim_zero_mean in reductions or (looks_back and not isinstance(part, _HOLDERS)):
            return False
    return is_mergeable(metric)


_STAT_SCORES = (classification.BinaryStatScores, classification.MulticlassStatScores)


def gives_one_class(metric: Any) -> bool:
    """Whether all samples in a metric were given one class though they are of several, as far as its counts tell."""
    if isinstance(metric, (classification.BinaryConfusionMatrix, classification.MulticlassConfusionMatrix)):
        true, given = metric.confmat.sum(1), metric.confmat.sum(0)
    elif isinstance(metric, _STAT_SCORES) and isinstance(metric.tp, Tensor):
        tp, fp, tn, fn = (getattr(metric, name) for name in ("tp", "fp", "tn", "fn"))
        true, given = tp + fn, tp + fp  # of each class, of the positive one, or of all in one number
        if isinstance(metric, classification.BinaryStatScores):
            true, given = torch.stack([true, tn + fp]), torch.stack([given, tn + fn])
    else:
        return False
    return int(given.count_nonzero()) == 1 < int(true.count_nonzero())


def updates_of(metric: Metric) -> int:
    """How often a metric and those that it wraps were updated since they were emptied."""
    parts = [part for _, part in submodules(metric) if isinstance(part, Metric) and not isinstance(part, _HOLDERS)]
    return sum(part._num_vals_seen if isinstance(part, Running) else part._update_count for part in parts)


def last_value(metric: Metric) -> Any:
    """What ``forward`` gave last; ``None`` if it was not called."""
    return metric._forward_cache


def in_forward(metric: Metric) -> bool:
    """Whether a ``compute`` that runs now was called by ``forward``, for the value of a batch."""
    return not metric._should_unsync


@cache
def lacking(contract: tuple[str, ...]) -> list[str]:
    """What this torchmetrics lacks of the private names in use."""
    missing = [f"Metric.{name}" for name in contract if not hasattr(_Empty(), name)]
    return missing + ["utilities.prints.warnings"] * (not hasattr(prints, "warnings"))


def names_of_states(metric: Metric) -> frozenset[str]:
    """Attributes of a metric that others see to: states that can be joined, and what torchmetrics has in all."""
    return _METRIC | (metric._defaults.keys() if is_mergeable(metric) else set())


class _Empty(Metric):
    def update(self) -> None:
        """Nothing."""

    def compute(self) -> None:
        """Nothing."""


_METRIC = frozenset(vars(_Empty()))
