# SPDX-License-Identifier: Apache-2.0
"""What is added to metrics in one process, noted so that it can be added in another one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_mean, dim_zero_sum

from fl_lightning.core.lightning.metric_state import MetricState, State, is_mergeable, read_state, write_state
from fl_lightning.core.seeding import isolated

_METHODS = ("update", "forward", "reset", "compute")


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
    has added up: it is not what it is where the entries go. Takes the places of the metric's methods.

    An update that adds up several numbers one after the other rounds otherwise where the metric is empty. Those of
    torchmetrics add once; others are tried out.

    Args:
        name: what the metric is called in entries.
        metric: the metric; :meth:`can_record` says of which.
        journal: takes the entries in their order.

    Attributes:
        doubt: why the entries are not all there is to it, in words; empty if they are.
    """

    def __init__(self, name: str, metric: Metric, journal: list[MetricUpdate]) -> None:
        self._name, self._metric, self._journal = name, metric, journal
        self._update, self._forward = metric.update, metric.forward
        self._reset, self._compute = metric.reset, metric.compute
        self._each = any(default.dtype.is_floating_point or default.dtype.is_complex for default in _sums(metric))
        own = type(metric).update.__module__.partition(".")[0] != "torchmetrics"
        self._doubtful = self._each and own
        self._in_forward = False
        self._since: State = {}
        self.doubt = ""
        self._own = {name: vars(metric)[name] for name in _METHODS if name in vars(metric)}
        vars(metric).update(update=self.update, forward=self.forward, reset=self.reset, compute=self.compute)
        self._reset()

    def undo(self) -> None:
        """Gives the metric its methods back; what it holds is up to the caller."""
        for name in _METHODS:
            del vars(self._metric)[name]
        vars(self._metric).update(self._own)

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
            state = read_state(self._metric)
            self._note(state, 1)
        if self._doubtful:
            self._try_out(state, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, noted."""
        self._in_forward, self._since = True, {}
        try:
            value = self._forward(*args, **kwargs)
        finally:
            self._in_forward = False
            if self._each and self._since:
                self._note(self._since, 1)
        if self._doubtful and self._metric.full_state_update is not False:  # else torchmetrics itself adds up batches
            self._try_out(self._since, *args, **kwargs)
        return value

    def _try_out(self, added: State, *args: Any, **kwargs: Any) -> None:
        """Whether an update adds to what the metric holds what it adds to nothing: of somebody's own, nobody knows."""
        metric = self._metric
        with isolated(0, metric.device):
            write_state(metric, _copied(added), 1)
            self._update(*args, **kwargs)
            found = read_state(metric)
            write_state(metric, _copied(added), 1)
            MetricUpdate(self._name, _copied(added), 1).repeat(metric)
            expected = read_state(metric)
        for name, value in found.items():
            other = expected[name]
            if isinstance(value, Tensor) and isinstance(other, Tensor) and not _same(value, other):
                self.doubt = self.doubt or f"updates metric {self._name!r}, which looks at what it holds already"

    def reset(self) -> None:
        """As ever, noted."""
        self._reset()
        if not self._in_forward:
            self._journal.append(MetricUpdate(self._name, None))

    def compute(self) -> Any:
        """As ever; outside ``forward`` it is noted that somebody sees what the metric has added up."""
        if not self._in_forward:
            self.doubt = self.doubt or f"computes metric {self._name!r} in a step"
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
        self.doubt = ""
        return value


def _sums(metric: Metric) -> list[Tensor]:
    defaults = metric._defaults
    summed = [defaults[name] for name, reduction in metric._reductions.items() if reduction is dim_zero_sum]
    return [default for default in summed if isinstance(default, Tensor)]


def _copied(state: State) -> State:
    return {k: list(v) if isinstance(v, list) else v.detach().clone() for k, v in state.items()}


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)
