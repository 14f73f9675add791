# SPDX-License-Identifier: Apache-2.0
"""What a module remembers from one evaluation to the next belongs to all clients, and is no client's own value.

``self.best = max(self.best, accuracy)`` in an epoch-end hook is the best value of the whole model so far. A client's
own best is nowhere. Such a value is told by running what logs it twice: with what is remembered, and without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchmetrics import Metric

from fl_lightning.fit.evaluation.one_client import top_metrics
from fl_lightning.lightning.metric_state import MetricState, is_mergeable
from fl_lightning.lightning.module.logged_row import LoggedRow
from fl_lightning.lightning.module.state_copy import StateCopy
from fl_lightning.lightning.names import LightningModule


class Memory:
    """Knows what earlier evaluations have left in a module.

    Attributes:
        names: logged names that depend on it.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._module: LightningModule | None = None
        self._first: StateCopy | None = None
        self._changed: set[str] = set()
        self._left: set[str] = set()
        self._metrics: list[Metric] = []
        self._states: list[MetricState] = []

    def begin(self, module: LightningModule, start: StateCopy) -> None:
        """An evaluation begins.

        Args:
            module: the module.
            start: what it holds.
        """
        if self._module is not module or self._first is None:
            self._module, self._first, self._changed, self.names = module, start, set(), set()
        self._left = self._changed.intersection(self._first.changes(start)) if self._changed else set()
        self._metrics = [m for m in top_metrics(module) if m._update_count > 0 and is_mergeable(m)]
        self._states = [MetricState(metric) for metric in self._metrics]

    def end(self, start: StateCopy, now: StateCopy, before: StateCopy | None = None) -> None:
        """An evaluation is over.

        Args:
            start: what the module held at its first batch.
            now: what it holds.
            before: what it held before the evaluation's first hook, if a callback lends the module other contents while
                it is evaluated: what it has taken back is not left behind.
        """
        changed = set(start.changes(now))
        self._changed.update(changed if before is None else changed.intersection(before.changes(now)))

    @property
    def is_empty(self) -> bool:
        """Whether earlier evaluations have left nothing."""
        return not (self._left or self._metrics)

    @contextmanager
    def forgotten(self) -> Iterator[None]:
        """What is bound now, without what earlier evaluations have left."""
        assert self._first is not None
        assert self._module is not None
        with self._first.in_place(self._left):
            for metric in top_metrics(self._module) if self._metrics else ():
                metric.reset()  # one that stands in for the module's own
            yield

    @contextmanager
    def other_way(self) -> Iterator[None]:
        """Around a hook for one client whose metrics hold its own batches only: attributes without, metrics with."""
        assert self._first is not None
        since = [MetricState(metric) for metric in self._metrics]
        try:
            for state in self._states:
                state.merge_back()
            with self._first.in_place(self._left):
                yield
        finally:
            for state in since:
                state.put_back()

    def compare(self, one: LoggedRow, other: LoggedRow) -> None:
        """Notes what differs."""
        for name in {**one.values, **other.values}:
            if repr(one.values.get(name)) != repr(other.values.get(name)):  # NaN equals NaN here
                self.names.add(name)
