# SPDX-License-Identifier: Apache-2.0
"""All that a module keeps beside its parameters, as it was at a moment, to be put back and carried on.

It is found from the attributes of the module and its submodules on: containers, tensors, arrays, generators, objects of
people's own, optimizers and data sets of the module's own. What changed inside comes back inside, so that all who hold
an object see the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import Metric, MetricCollection

from fl_lightning.core.modules import buffers_of, named_metrics, submodules
from fl_lightning.lightning.metric_state import MetricState, is_mergeable, joins_clients, parts_of
from fl_lightning.lightning.module.contents import HOLDERS, PLAIN, Kind, held_by
from fl_lightning.lightning.module.kinds import kinds_of
from fl_lightning.lightning.module.objects import (
    FRAMEWORK,
    LIGHTNING_MODULE,
    METRIC,
    MODULE,
    NAMED,
    PARAMETER_HOOKS,
    TABLES,
    Object,
    Objects,
)  # fmt: skip
from fl_lightning.lightning.module.shared import Shared
from fl_lightning.lightning.names import LightningModule

_HOOKS = frozenset(
    name for name in FRAMEWORK if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
)
_MANY = 100_000
"""Objects of one module that are looked after; what is found beyond these is left alone."""


class Snapshot(Objects):
    """What objects hold, and all that they lead to.

    ``roots`` are objects and their names. ``known`` are objects, by path, that others see to.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], known: dict[str, Any]) -> None:
        self._known = known
        self.objects = []  # all that may change, in an order that is the same in copies of the roots
        self.unfollowed: dict[str, str] = {}  # kinds of attributes that cannot be put back, iterators and open files
        self.tensors: list[tuple[str, Tensor]] = []
        self.joined: dict[str, Metric] = {}  # metrics to which several add
        self.buffers: Object | None = None  # names of a module's buffers
        self._found: dict[str, Any] = {}  # beside what is known, by path
        self._seen = {id(value) for value in known.values()}
        self._waiting = deque[tuple[Any, str, str]]((value, name, "") for name, value in roots)
        self._of_data = deque[tuple[Any, str, str]]()
        self._look_into(self._waiting, of_data=False)

    def _add(self, value: Any, name: str, kind: Kind, path: str = "", look: bool = True) -> Object:
        found = Object(value, name, kind, path, self._waiting if look else None)
        self.objects.append(found)
        return found

    def _look_into(self, waiting: deque[tuple[Any, str, str]], of_data: bool) -> None:
        self._waiting = waiting
        while waiting:
            value, name, path = waiting.popleft()
            if id(value) in self._seen:
                continue
            if isinstance(value, (Dataset, DataLoader, Sampler)) and not of_data:
                self._of_data.append((value, name, path))
                continue
            self._seen.add(id(value))
            if isinstance(value, HOLDERS):
                found = held_by(value)
                waiting.extend((part, name, path + step) for step, part in found if not isinstance(part, PLAIN))
            else:
                self._look_at(value, name, path, of_data)

    def _look_at(self, value: Any, name: str, path: str, of_data: bool) -> None:
        if isinstance(value, Tensor):
            self.tensors.append((name, value))
        kinds = kinds_of(value, of_data) if len(self.objects) < _MANY else None
        if kinds is None:
            self.unfollowed.setdefault(name, type(value).__name__)
        elif kinds:
            self._found[f"{name}#{path}"] = value
            for kind in kinds:
                self._add(value, name, kind, path)

    # ---- names

    @cached_property
    def shared(self) -> Shared:
        """What copies have, too, by names that they share."""
        return Shared(self._known | self._found)

    @cached_property
    def by_path(self) -> dict[tuple[str, bool], Object]:
        """Objects that may change, by path, and whether these are their attributes."""
        paths = self.shared.paths
        return {(paths[id(one.value)], one.kind in NAMED): one for one in self.objects if id(one.value) in paths}


class ModuleSnapshot(Snapshot):
    """What a module held when this was made, but for its parameters.

    The trainer, its optimizers and schedulers, callbacks and data modules are not the module's. Others see to what is
    in buffers and in metrics that can be joined, unless the snapshot is ``whole``.
    """

    def __init__(self, module: nn.Module, whole: bool = False) -> None:
        super().__init__((), known_in(module))
        self._module, self._whole = module, whole
        self._joins = is_mergeable if whole else joins_clients
        self.metrics: dict[str, Metric] = dict(named_metrics(module))  # those outside its submodules included
        self.joined = {name: metric for name, metric in self.metrics.items() if self._joins(metric)}
        self._wrapped = set[int]()  # metrics in others that no attribute of the module's own holds
        self._seen |= {id(value) for value in _looked_after(module)}
        parts = submodules(module)
        inside = {id(part) for metric in self.joined.values() for _, part in submodules(metric)}
        outside = [(name, part) for name, part in parts if id(part) not in inside]
        for name, part in outside:
            if not isinstance(part, MetricCollection):
                self._add(part, name, LIGHTNING_MODULE if isinstance(part, LightningModule) else MODULE)
        for name, metric in self.joined.items():
            self._add_beside_states(metric, name)
        self._add_tables(outside)
        self._look_into(self._waiting, of_data=False)
        self._look_into(self._of_data, of_data=True)
        self._quiet: list[Object] = []
        self.states: list[MetricState] = []  # of metrics that can be joined
        if whole:
            self._add_rest(outside)

    def _add_tables(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        named = [(f"{name}." if name else "", part) for name, part in parts]
        hooks = {at + n: table for at, part in named for n in _HOOKS if (table := vars(part).get(n)) is not None}
        self.fixed = [  # what a visit must leave as it is
            self._add({at: part._modules for at, part in named}, "", TABLES, look=False),
            self._add(hooks, "", TABLES),
            self._add(dict(self._module.named_parameters()), "", PARAMETER_HOOKS),
        ]
        self.buffers = self._add({at: part._buffers for at, part in named}, "", TABLES, look=False)

    def _add_rest(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        for _, _, name, buffer in chain(*buffers_of(self._module)):
            for kind in kinds_of(buffer) or ():
                self._add(buffer, name, kind)
        # What collections know of their metrics comes back only where it was not the evaluation itself that changed it.
        others = len(self.objects)
        for name, part in parts:
            if isinstance(part, MetricCollection):
                self._add(part, name, MODULE)
        self._look_into(self._waiting, of_data=False)
        self._quiet, self.objects = self.objects[others:], self.objects[:others]
        self.states = [MetricState(metric) for metric in self.joined.values()]

    def _add_beside_states(self, metric: Metric, name: str, path: str = "") -> None:
        for at, part in parts_of(metric):
            self._add(part, f"{name}.{at}" if at else name, METRIC, path)

    def _look_at(self, value: Any, name: str, path: str, of_data: bool) -> None:
        if isinstance(value, Metric) and id(value) not in self._wrapped:
            hidden = f"{len(self.metrics)} in {name}"
            self.metrics[hidden] = value
            self._wrapped |= {id(part) for _, part in submodules(value)}
            if self._joins(value):
                self.joined[hidden] = value
                self._found[f"{name}#{path}"] = value
                self._add_beside_states(value, name, path)
                return
        super()._look_at(value, name, path, of_data)

    @cached_property
    def shared(self) -> Shared:
        """What copies of the module have, too, by names that they share."""
        buffers = {"buffers": self.buffers.value} if self._whole and self.buffers is not None else {}
        return Shared(self._known | buffers | self._found, self._module)

    def current(self) -> ModuleSnapshot:
        """A snapshot of the module now: this one, if nothing has changed."""
        return ModuleSnapshot(self._module, self._whole) if self.changed() else self

    def put(self) -> None:
        """Puts everything back."""
        for found in (*self.changed(), *self._quiet):
            found.restore()
        for state in self.states:
            state.restore()

    def empty_metrics(self) -> None:
        """Lets all metrics start from zero."""
        for metric in self.metrics.values():
            metric.reset()


def known_in(module: nn.Module) -> dict[str, Any]:
    """Submodules, parameters and buffers of a module, by path."""
    found: dict[str, Any] = {}
    for name, part in submodules(module):
        found[f"module {name}"] = part
        for kind, values in (("parameter", part._parameters), ("buffer", part._buffers)):
            found |= {f"{kind} {name}.{key}": value for key, value in values.items() if value is not None}
    return found


def _looked_after(module: nn.Module) -> Iterable[Any]:
    """What a module may hold and its trainer sees to."""
    trainer = module._trainer if isinstance(module, LightningModule) else None
    return () if trainer is None else (*trainer.optimizers, *(c.scheduler for c in trainer.lr_scheduler_configs))


@contextmanager
def shadowed(owner: object, **values: Any) -> Iterator[None]:
    """Puts other values in front of attributes and methods of an object, and takes them away in the end."""
    attributes = vars(owner)  # nn.Module's own way of setting one would register submodules and tensors
    hidden = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(hidden)
