# SPDX-License-Identifier: Apache-2.0
"""All that a module keeps beside its parameters, as it was at a moment, to be put back and carried on.

It is found from the attributes of the module and its submodules on: containers, tensors, arrays, generators, objects of
people's own, optimizers and data sets of the module's own. What changed inside comes back inside, so that all who hold
an object see the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.core.modules import buffers_of, named_metrics, submodules
from fl_lightning.lightning.metric_state import MetricState, is_mergeable, joins_clients, names_of_states, parts_of
from fl_lightning.lightning.module.objects import Attributes, Object, changed, objects_in, same_entries
from fl_lightning.lightning.module.values import OF_DATA, PLAIN
from fl_lightning.lightning.names import LightningModule

FRAMEWORK = frozenset((*vars(nn.Module()), *vars(LightningModule()), "_hparams_initial"))
"""Attributes of modules that belong to torch and Lightning."""
_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_OF_LIGHTNING = _TABLES | {
    "_trainer", "_fabric", "_current_fx_name", "_metric_attributes", "log", "log_dict", "federated_features",
}  # fmt: skip
"""What is another at every moment, too."""

_HOOKS = [n for n in FRAMEWORK if n.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))]
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # None before the first

_MANY = 100_000
"""Objects of one module that are looked after; what is found beyond these is left alone."""


class Snapshot:
    """What objects hold, and all that they lead to.

    ``roots`` are objects and their names. ``known`` are objects, by path, that others see to.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], known: dict[str, Any]) -> None:
        self.objects: list[Object] = []  # all that may change, in an order that is the same in copies of the roots
        self.unfollowed: dict[str, str] = {}  # kinds of attributes that cannot be put back, iterators and open files
        self.tensors: list[tuple[str, Tensor]] = []
        self.joined: dict[str, Metric] = {}  # metrics to which several add
        self.by_path = dict(known)  # what copies have, too
        self._seen = {id(value) for value in known.values()}
        self._waiting = deque[tuple[Any, str, str]]((value, name, "") for name, value in roots)
        self._of_data = deque[tuple[Any, str, str]]()
        self._look()

    def _add(self, *found: Object) -> None:
        self.objects += found
        self._wait_for(part for one in found for part in one.parts())

    def _wait_for(self, parts: Iterable[tuple[Any, str, str]]) -> None:
        self._waiting.extend(part for part in parts if not isinstance(part[0], PLAIN))

    def _look(self, of_data: bool = False) -> None:
        while self._waiting:
            value, name, path = self._waiting.popleft()
            if id(value) in self._seen:
                continue
            if isinstance(value, OF_DATA) and not of_data:
                self._of_data.append((value, name, path))
                continue
            self._seen.add(id(value))
            held = _held_by(value)
            if held is None:
                self._look_at(value, name, path, of_data)
            else:
                self._wait_for((part, name, f"{path}[{at}]") for at, part in enumerate(held))
        if self._of_data:
            self._waiting, self._of_data = self._of_data, self._waiting
            self._look(of_data=True)

    def _look_at(self, value: Any, name: str, path: str, of_data: bool) -> None:
        if isinstance(value, Tensor):
            self.tensors.append((name, value))
        found = objects_in(value, name, path, of_data) if len(self.objects) < _MANY else None
        if found is None:
            self.unfollowed.setdefault(name, type(value).__name__)
        elif found:
            self.by_path[f"{name}#{path}"] = value
            self._add(*found)

    @cached_property
    def paths(self) -> dict[int, str]:
        """The paths of objects that copies have, too, by their identities."""
        return {id(value): path for path, value in reversed(self.by_path.items())}

    @cached_property
    def _by_id(self) -> dict[tuple[int, bool], Object]:
        return {(id(one.value), isinstance(one, Attributes)): one for one in self.objects}

    def find(self, path: str, of_attributes: bool) -> Object:
        """The object at a path, or its attributes; a KeyError if it cannot change."""
        return self._by_id[id(self.by_path[path]), of_attributes]

    def changed(self) -> list[Object]:
        """The objects that hold something else now."""
        return changed(self.objects)

    def restore(self) -> None:
        """Lets all objects hold what they held; metrics of which others see to their states apart."""
        for found in self.changed():
            found.restore()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Lets all objects hold what they held for a moment."""
        now = [(found, found.read()) for found in self.changed()]
        self.restore()
        try:
            yield
        finally:
            for found, content in now:
                found.put(content)


class Part(Attributes):
    """The attributes of a submodule, without its tables and what Lightning has there."""

    def __init__(self, value: nn.Module, name: str) -> None:
        super().__init__(value, name, "", _OF_LIGHTNING if isinstance(value, LightningModule) else _TABLES)

    def parts(self) -> Iterable[tuple[Any, str, str]]:
        """Nobody changes what torch and Lightning have there."""
        return [(self.content[name], self.shown_as(name), "") for name in sorted(self.content.keys() - FRAMEWORK)]

    def shown_as(self, name: str) -> str:
        """Its own name."""
        return f"{self.name}.{name}" if self.name else name


class Tables(Object):
    """Dictionaries of torch's, by name, as a function finds them: submodules, buffers, hooks."""

    def read(self) -> dict[str, dict[Any, Any]]:
        """Those that are not empty."""
        return {at: dict(table) for at, table in self.value().items() if table}

    def is_same(self) -> bool:
        """Whether all have the same entries in the same order."""
        now, then = {at: table for at, table in self.value().items() if table}, self.content
        return now.keys() == then.keys() and all(same_entries(now[at], table) for at, table in then.items())

    def put(self, content: Mapping[str, dict[Any, Any]]) -> None:
        """Fills them, and empties others."""
        for at, table in self.value().items():
            table.clear()
            table.update(content.get(at, {}))

    def parts(self) -> Iterable[tuple[Any, str, str]]:
        """Objects in them."""
        found = [(at, place, part) for at, t in self.content.items() for place, part in enumerate(t.values())]
        return [(part, "", f"{at}[{place}]") for at, place, part in found]

    def changed_names(self, new: bool = False) -> list[str]:
        """The entries that are others now, or the ``new`` ones alone."""
        found, now = [], self.read()
        for at in {**self.content, **now}:
            before, after = self.content.get(at, {}), now.get(at, {})
            names = [n for n in {**before, **after} if after.get(n, self) is not before.get(n, self)]
            found += [at + n if isinstance(n, str) else at for n in names if not new or n not in before]
        return found  # hooks have numbers


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
        inside = {id(part) for metric in self.joined.values() for _, part in submodules(metric)}
        outside = [(name, part) for name, part in submodules(module) if id(part) not in inside]
        # Collections find out which of their metrics have the same states, once for all.
        self._add(*(Part(part, name) for name, part in outside if not isinstance(part, MetricCollection)))
        self._add(*(Attributes(parameter, name) for name, parameter in module.named_parameters()))
        for name, metric in self.joined.items():
            self._add_beside_states(metric, name)
        self._add_tables({f"{name}." if name else "": part for name, part in outside})
        if whole:
            buffers = [(buffer.name, buffer.value) for buffer in chain(*buffers_of(module))]
            self._add(*(found for name, buffer in buffers for found in objects_in(buffer, name) or ()))
        self._look()
        # Of metrics that can be joined.
        self.states = [MetricState(metric) for metric in self.joined.values()] if whole else []

    def _add_tables(self, parts: dict[str, nn.Module]) -> None:
        hooks = {at + name: vars(part).get(name) for at, part in parts.items() for name in _HOOKS}
        tables = {at: part._modules for at, part in parts.items()} | hooks
        structure = partial(_structure, tables, list(self._module.named_parameters()))
        self.structure = Tables(structure, "")  # what a visit must leave as it is
        self.buffers = Tables({at: part._buffers for at, part in parts.items()}.copy, "")
        self._add(self.structure, self.buffers)
        if self._whole:
            self.by_path["buffers"] = self.buffers.value

    def _add_beside_states(self, metric: Metric, name: str, path: str = "") -> None:
        for at, part in parts_of(metric):
            self._add(Attributes(part, f"{name}.{at}" if at else name, path, names_of_states(part)))

    def _look_at(self, value: Any, name: str, path: str, of_data: bool) -> None:
        if isinstance(value, Metric) and id(value) not in self._wrapped:
            hidden = f"{len(self.metrics)} in {name}"
            self.metrics[hidden] = value
            self._wrapped |= {id(part) for _, part in submodules(value)}
            if self._joins(value):
                self.joined[hidden] = value
                self.by_path[f"{name}#{path}"] = value
                self._add_beside_states(value, name, path)
                return
        super()._look_at(value, name, path, of_data)

    def current(self) -> ModuleSnapshot:
        """A snapshot of the module now: this one, if nothing has changed."""
        return ModuleSnapshot(self._module, self._whole) if self.changed() else self

    def put(self) -> None:
        """Puts everything back, metrics that can be joined too."""
        self.restore()
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


def _held_by(value: Any) -> Iterable[Any] | None:
    """What is in something that never changes itself."""
    if isinstance(value, MetricCollection):  # others look after its attributes
        return value.values(copy_state=False)
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    return value if isinstance(value, (tuple, frozenset)) else None


def _structure(tables: Mapping[str, Any], parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    hooks = {f"{name}.{key}": getattr(parameter, key) for name, parameter in parameters for key in _PARAMETER_HOOKS}
    return {at: table for at, table in (*tables.items(), *hooks.items()) if table is not None}


def _looked_after(module: nn.Module) -> Iterable[Any]:
    """What a module may hold and its trainer sees to."""
    trainer = module._trainer if isinstance(module, LightningModule) else None
    return () if trainer is None else (*trainer.optimizers, *(c.scheduler for c in trainer.lr_scheduler_configs))
