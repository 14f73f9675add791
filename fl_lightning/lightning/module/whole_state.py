# SPDX-License-Identifier: Apache-2.0
"""All that a module holds beside its parameters, put back in place as often as needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.core.modules import all_buffers_of, outside_metrics, submodules
from fl_lightning.lightning.metric_state import MetricState, is_mergeable
from fl_lightning.lightning.module.contents import PLAIN
from fl_lightning.lightning.module.kept_objects import Kept, Names, Numbers, kinds_of
from fl_lightning.lightning.module.object_state import ObjectState, PartNames


class _Bindings(Kept):
    """Which buffers or submodules the parts of a module have by which names; what is in them is kept by itself."""

    value: list[tuple[str, dict[str, Any]]]

    def now(self) -> list[dict[str, Any]]:
        return [dict(names) for _, names in self.value]

    def is_same(self) -> bool:
        return all(
            len(now) == len(then) and all(map(is_, map(now.get, then), then.values()))
            for (_, now), then in zip(self.value, self.content, strict=True)
        )

    def put(self, content: list[dict[str, Any]]) -> None:
        for (_, names), then in zip(self.value, content, strict=True):
            names.clear()
            names.update(then)

    def changed_names(self) -> list[str]:
        both = [(at, now, then) for (at, now), then in zip(self.value, self.content, strict=True)]
        return [at + n for at, now, then in both for n in {**then, **now} if now.get(n, self) is not then.get(n, self)]

    def parts(self) -> Iterable[tuple[Any, str]]:
        return ()


class WholeState(ObjectState):
    """What a module held when this was made: attributes, buffers, submodules and metrics.

    Of a metric whose states can be joined, the states are remembered. Of any other, all that it holds.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, is_mergeable)
        waiting = deque[tuple[Any, str]]()
        parts = outside_metrics(submodules(module))
        named = [(f"{prefix}." if prefix else "", part) for prefix, part in parts]
        self._keep(_Bindings([(at, part._buffers) for at, part in named], ""), waiting)
        for _, _, name, buffer in all_buffers_of(module):
            for kind in kinds_of(buffer) or ():
                self._keep(kind(buffer, name), waiting)
        self.attributes = list(self.kept)  # and buffers, those of metrics that cannot be joined left out
        self._keep(_Bindings([(at, part._modules) for at, part in named], ""), waiting)
        wrappers = [(n.rpartition(" in ")[2], metric) for n, metric in self.metrics.items() if not is_mergeable(metric)]
        inside = [(name, part) for name, metric in wrappers for _, part in submodules(metric)]
        self._seen.update(id(own) for _, part in inside for own in (part, *part._parameters.values()))
        for name, part in inside:
            self._keep(Names(part, name), waiting)
            own = part._buffers.values() if isinstance(part, Metric) else ()
            for buffer in [buffer for buffer in own if buffer is not None]:
                self._keep(Numbers(buffer, name), waiting)
        self._look_into(waiting)
        # What collections know of their metrics comes back only where it was not the evaluation itself that changed it.
        whole = len(self.kept)
        for prefix, part in parts:
            if isinstance(part, MetricCollection):
                self._keep(PartNames(part, prefix), waiting)
        self._look_into(waiting)
        self._collections, self.kept = self.kept[whole:], self.kept[:whole]
        self.states = [MetricState(metric) for metric in self.metrics.values() if is_mergeable(metric)]

    def put(self) -> None:
        """Puts everything back."""
        for kept in (*self.changed(), *self._collections):
            kept.put(kept.content)
        for state in self.states:
            state.put_back()

    def empty_metrics(self) -> None:
        """Lets all metrics start from zero."""
        for metric in self.metrics.values():
            metric.reset()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What the module holds now comes back in the end."""
        later = [(kept, kept.now()) for kept in (*self.changed(), *self._collections)]
        states = [MetricState(state.metric) for state in self.states]
        try:
            yield
        finally:
            self.put_back()
            for kept, content in later:
                kept.put(content)
            for state in states:
                state.put_back()


def means_the_same(kept: Kept) -> bool:
    """Whether attributes were only bound to other objects with the same contents, as caches are."""
    if not isinstance(kept, Names):
        return False
    bound, gone = kept.change()
    return not gone and all(is_equal(value, kept.content.get(name, kept)) for name, value in bound.items())


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values that nobody changes, or two tensors, are the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(one.equal(other))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return isinstance(one, PLAIN) and (one is other or bool(one == other) or bool(one != one and other != other))
