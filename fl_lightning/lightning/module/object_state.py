# SPDX-License-Identifier: Apache-2.0
"""All that a module keeps beside parameters and buffers, as it was at a moment, to be put back and carried on.

It is found from the attributes of the module and its submodules on: containers, tensors, arrays, generators, and
objects of people's own with all that they hold. Whatever changed inside comes back inside, so that everybody who
holds an object sees the same.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

from torch import nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.core.modules import modes_kept, named_metrics, outside_metrics, submodules
from fl_lightning.lightning.metric_state import MetricState, joins_clients
from fl_lightning.lightning.module.module_state import shadowed
from fl_lightning.lightning.module.object_kinds import ITEMS, METRIC, PART, PLAIN, Bound, How, held_by, kinds_of
from fl_lightning.lightning.names import LightningModule

_HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
_EMPTY = (dict, OrderedDict)
_MANY = 100_000
"""Objects of one module that are looked after; what is found beyond these is left alone."""


class Added(NamedTuple):
    """Items that were added at the end of a list or a deque."""

    items: list[Any]


class Kept:
    """One object and what it held when it was looked at.

    Args:
        value: the object.
        name: of the attribute of the module from which it was reached; of a submodule, its own.
        how: how it is looked at.

    Attributes:
        value: the object.
        how: how it is looked at.
    """

    def __init__(self, value: Any, name: str, how: How) -> None:
        self.value, self.how, self._name = value, how, name
        self._content = how.read(value)

    def is_same(self) -> bool:
        """Whether it holds what it held; other objects in it are looked at by themselves."""
        return self.how.same(self.value, self._content)

    def put_back(self) -> None:
        """Lets it hold what it held."""
        self.how.write(self.value, self._content)

    def change(self) -> Any:
        """What has happened to it since, for :meth:`apply`."""
        now = self.how.read(self.value)
        if self.how.of_names:
            return Bound.between(self._content, now)
        added = _added(self.value, self._content, now) if isinstance(self.value, (list, deque)) else None
        return now if added is None else Added(added)

    def apply(self, change: Any) -> None:
        """Lets the same happen to it."""
        if isinstance(change, Bound):
            change.apply(self.value)
        elif isinstance(change, Added):
            self.value.extend(change.items)
        else:
            self.how.write(self.value, change)

    def changed_names(self) -> list[str]:
        """The attributes of the module that a change shows in."""
        if self.how is not PART:
            return [self._name]
        change = self.change()
        return [self._at(name) for name in (*change.values, *change.gone)]

    def new_lists(self, change: Any) -> dict[Any, Any]:
        """Lists and deques in a change under names or keys that were not there."""
        values = change.values if isinstance(change, Bound) else change if isinstance(self.value, dict) else {}
        return {k: v for k, v in values.items() if type(v) in (list, deque) and k not in self._content}

    def bind(self, values: dict[Any, Any]) -> None:
        """Binds values to names or keys."""
        if self.how.of_names:
            Bound(values, []).apply(self.value)
        elif values:
            self.value.update(values)

    def parts(self) -> Iterable[tuple[Any, str]]:
        """The objects in what it held, and the attributes from which they are reached."""
        if self.how is PART:
            return ((value, self._at(name)) for name, value in self._content.items())
        return ((value, self._name) for value in self.how.parts(self._content))

    def _at(self, name: str) -> str:
        return f"{self._name}.{name}" if self._name else name


def _added(value: Any, then: list[Any], now: list[Any]) -> list[Any] | None:
    """What was added, if nothing else has happened but that first items have fallen out of a full deque."""
    full = isinstance(value, deque) and len(now) == value.maxlen
    for dropped in range(len(then) + 1 if full else 1):
        rest = then[dropped:]
        if len(rest) <= len(now) and all(map(is_, rest, now)):
            return now[len(rest) :]
    return None


class ObjectState:
    """What the plain attributes of a module and its submodules held when this was made.

    Parameters, buffers, submodules, the trainer, callbacks, data sets and metrics are not among them.

    Args:
        module: the module.

    Attributes:
        kept: every object that may change, in an order that is the same in copies of the module.
        metrics: metric objects by name, those that the module holds outside its submodules included.
        alone: attributes with objects that cannot be put back, iterators and open files for instance, and their kinds.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.kept: list[Kept] = []
        self.metrics: dict[str, Metric] = dict(named_metrics(module))
        self.alone: dict[str, str] = {}
        self._hooks: list[Kept] = []  # of torch: many dictionaries, and hardly ever anything in them
        parts = submodules(module)
        self._structure = [(part, list(part._modules.values())) for _, part in parts]
        self.own: list[Any] = []
        for _, part in parts:
            self.own += [part, *part._parameters.values(), *part._buffers.values()]
        self._seen = set(map(id, self.own))
        waiting = deque[tuple[Any, str]]()
        for prefix, part in outside_metrics(parts):
            if not isinstance(part, MetricCollection):
                self._keep(Kept(part, prefix, PART), waiting)
        for prefix, metric in self.metrics.items():
            if joins_clients(metric):
                self._keep(Kept(metric, prefix, METRIC), waiting)
        while waiting:
            self._look_at(*waiting.popleft(), waiting)

    def _keep(self, kept: Kept, waiting: deque[tuple[Any, str]]) -> None:
        self.kept.append(kept)
        for value, name in kept.parts():
            if type(value) in _EMPTY and not value and name.rpartition(".")[2] in _HOOKS:
                if id(value) not in self._seen:
                    self._seen.add(id(value))
                    self._hooks.append(Kept(value, name, ITEMS))
            elif not isinstance(value, PLAIN):
                waiting.append((value, name))

    def _look_at(self, value: Any, name: str, waiting: deque[tuple[Any, str]]) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        inside = held_by(value)
        if inside is not None:
            waiting.extend((part, name) for part in inside if not isinstance(part, PLAIN))
            return
        if isinstance(value, Metric):
            self.metrics[f"{len(self.metrics)} in {name}"] = value
            if joins_clients(value):
                self._keep(Kept(value, name, METRIC), waiting)
        kinds = kinds_of(value) if len(self.kept) < _MANY else None
        if kinds is None:
            self.alone.setdefault(name, type(value).__name__)
        for kind in kinds or ():
            self._keep(Kept(value, name, kind), waiting)

    @property
    def known(self) -> list[Any]:
        """All that copies of the module have at the same places: what belongs to it, and what is kept."""
        kept = [*self.kept, *self._hooks]
        return [*self.own, *self.metrics.values(), *kept, *(one.value for one in kept)]

    def current(self) -> ObjectState:
        """The state of the module now: this one, if nothing has changed."""
        same = all(
            len(part._modules) == len(children) and all(map(is_, part._modules.values(), children))
            for part, children in self._structure
        )
        return self if same and not self.changed() else ObjectState(self._module)

    def changed(self) -> list[Kept]:
        """The objects that hold something else now."""
        hooks = [kept for kept in self._hooks if kept.value]
        return [*(kept for kept in self.kept if not kept.is_same()), *hooks]


class Undone:
    """Runs a module without a trace in its attributes and metrics, and without a word to its loggers.

    Args:
        module: the module.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._state: ObjectState | None = None

    @contextmanager
    def __call__(self, evaluate: bool = True) -> Iterator[None]:
        """Metrics are empty, ``self.log`` does nothing, and everything comes back in the end.

        Args:
            evaluate: eval mode; False leaves the modes alone.
        """
        module = self._module
        state = self._state = ObjectState(module) if self._state is None else self._state.current()
        parts = [part for metric in state.metrics.values() for _, part in submodules(metric)]
        metrics = [MetricState(part) for part in parts if isinstance(part, Metric)]
        for metric in metrics:
            metric.reset()
        try:
            with shadowed(module, log=_ignore, log_dict=_ignore), modes_kept(submodules(module)):
                if evaluate:
                    module.eval()
                yield
        finally:
            for kept in state.changed():
                kept.put_back()
            for metric in metrics:
                metric.put_back()


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None
