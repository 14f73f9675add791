# SPDX-License-Identifier: Apache-2.0
"""Notices what a module's evaluation steps carry from one client's batches to the next one's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torchmetrics import Metric

from fl_lightning.core.modules import submodules
from fl_lightning.fit.evaluation.one_client import top_metrics
from fl_lightning.lightning.metric_state import MetricState, is_mergeable
from fl_lightning.lightning.module.logged_row import LoggedRow
from fl_lightning.lightning.module.module_state import ModuleState, refill, shadowed, state_kept
from fl_lightning.lightning.module.state_copy import StateCopy
from fl_lightning.lightning.module.undefined_metrics import Noticed
from fl_lightning.lightning.names import LightningModule


class Carried:
    """Compares what a module holds with what it held before its first evaluation batch.

    Lists and deques that only grow, and metrics whose states can be joined, are no concern: what a client adds can be
    told from what was there. Everything else that changes is carried on: sums, counters, arrays, objects.

    Args:
        module: the module, before its first evaluation batch.
        known: what :class:`StateCopy` cannot take; grows.

    Attributes:
        start: what the module held.
        names: what changes and can be undone.
        lost: what changes and cannot be undone.
    """

    def __init__(self, module: LightningModule, known: set[tuple[str, int]]) -> None:
        self._module, self._known = module, known
        self.start = StateCopy(module, known=known)
        self._sequences = [
            (items, len(items))
            for items in ModuleState(module).sequences()
            if not isinstance(items, deque) or items.maxlen is None
        ]
        self._lengths = [length for _, length in self._sequences]
        self._metrics = top_metrics(module)
        self._whole = [(m, _updates(m)) for m in self._metrics if not is_mergeable(m)]
        self._clients = 0
        self.names: list[str] = []
        self.lost: list[str] = []

    @property
    def found(self) -> bool:
        """Whether anything is carried on."""
        return bool(self.names or self.lost)

    @property
    def lengths(self) -> dict[int, int]:
        """How many items the lists held, by their ids."""
        return {id(items): length for items, length in self._sequences}

    def has_grown(self) -> bool:
        """Whether steps gather in lists."""
        return any(len(items) > length for items, length in self._sequences)

    def after_batch(self) -> None:
        """A list that became shorter has been used and emptied on the way."""
        lengths = [len(items) for items, _ in self._sequences]
        if any(now < before for now, before in zip(lengths, self._lengths, strict=True)):
            self.add("a list that it empties on the way")
        self._lengths = lengths

    def after_client(self, last: bool) -> None:
        """Compares, after the first clients, then ever more rarely, and after the last one."""
        self._clients += 1
        for metric, updates in self._whole:
            if _updates(metric) != updates:
                self.add(type(metric).__name__)
        if self.found or (self._clients & (self._clients - 1) and not last):
            return
        with state_kept(self._module):
            for items, length in self._sequences:
                refill(items, list(items)[:length])
            now = StateCopy(self._module, metrics=False, known=self._known)
        shared = {*self.start.shared, *now.shared}
        for name in self.start.changes(now):
            (self.lost if name in shared else self.names).append(name)

    def add(self, name: str) -> None:
        """Something else is carried on."""
        if name not in self.names:
            self.names.append(name)

    @contextmanager
    def in_steps(self, aside: dict[int, MetricState], noticed: Noticed) -> Iterator[None]:
        """Around a step: a metric that it computes gives the value of all clients so far.

        Args:
            aside: what metrics held before the client, by their ids.
            noticed: is not to hear of a metric's value of one batch.
        """
        with ExitStack() as stack:
            for metric in self._metrics:
                stack.enter_context(self._whole_value(metric, aside.get(id(metric)), noticed))
            yield

    @contextmanager
    def _whole_value(self, metric: Metric, before: MetricState | None, noticed: Noticed) -> Iterator[None]:
        own_compute, own_forward = metric.compute, metric.forward

        def compute() -> Any:
            self.add(f"{type(metric).__name__}.compute() in a step")
            if before is None:
                return own_compute()
            since = MetricState(metric)
            before.merge_back()
            try:
                return own_compute()
            finally:
                since.put_back()

        def forward(*args: Any, **kwargs: Any) -> Any:
            heard = len(noticed.reasons)
            with shadowed(metric, compute=own_compute):
                value = own_forward(*args, **kwargs)
            del noticed.reasons[heard:]
            return value

        with shadowed(metric, compute=compute, forward=forward):
            yield

    def reads_lists(self, step: Callable[[], LoggedRow]) -> bool:
        """Whether what a step logs depends on the lists in which steps gather.

        Args:
            step: runs a step without a trace and returns what it logs.
        """
        with state_kept(self._module), self.start.in_place():
            expected = step()
        with state_kept(self._module):
            for items, length in self._sequences:
                if len(items) > length:
                    refill(items, list(items)[:length] + [_Unreadable()] * (len(items) - length + 1))
            try:
                return repr(step().values) != repr(expected.values)  # NaN equals NaN here
            except Exception:  # it has found what is in the lists now
                return True


def _updates(metric: Metric) -> int:
    """How often a metric and what it wraps were updated: some wrappers do not count."""
    return sum(int(part._update_count) for _, part in submodules(metric) if isinstance(part, Metric))


class _Unreadable:
    """Nothing can be computed from it."""

    __slots__ = ()
