# SPDX-License-Identifier: Apache-2.0
"""Mutable objects and what they held at a moment: compared, put back in place, and changed to what others hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from types import MemberDescriptorType
from typing import Any, NamedTuple

from torch import nn

from fl_lightning.core.errors import ModuleError
from fl_lightning.lightning.metric_state import beside_states
from fl_lightning.lightning.module.contents import OF_DATA, PLAIN, Kind, Step, numbered
from fl_lightning.lightning.names import LightningModule

FRAMEWORK = frozenset((*vars(nn.Module()), *vars(LightningModule()), "_hparams_initial"))
"""Attributes of modules that belong to torch and Lightning."""

_PARTS = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_OF_LIGHTNING = _PARTS | {
    "_trainer", "_fabric", "_current_fx_name", "_metric_attributes", "log", "log_dict", "federated_features",
}  # fmt: skip
"""What is another at every moment, too."""


class Bound(NamedTuple):
    """Attributes that were bound anew, and those that are gone."""

    values: dict[str, Any]
    gone: list[str]


class Added(NamedTuple):
    """Items that were added to a list or a deque."""

    items: list[Any]


class Object:
    """One object and what it held when it was looked at.

    ``name`` is the module's attribute that leads to it, and ``path`` the way to it from there. What it holds comes to
    ``waiting``, each object with its name and path.
    """

    def __init__(
        self, value: Any, name: str, kind: Kind, path: str = "", waiting: deque[tuple[Any, str, str]] | None = None
    ) -> None:
        self.value, self.name, self.kind, self.path = value, name, kind, path
        self.content = kind.read(value)
        if waiting is not None:
            waiting.extend(part for part in self._parts() if not isinstance(part[0], PLAIN))

    def is_same(self) -> bool:
        """Whether it holds what it held."""
        return self.kind.same(self.value, self.content)

    def now(self) -> Any:
        """What it holds now."""
        return self.kind.read(self.value)

    def put(self, content: Any) -> None:
        """Lets it hold what :meth:`now` returned."""
        self.kind.write(self.value, content)

    def restore(self) -> None:
        """Lets it hold what it held."""
        if self.kind is OF_DATA:  # nobody knows what that was
            self.content = self.now()
            raise ModuleError(
                "a data set that a module keeps must not change while clients train or are evaluated, found changes in "
                f"{self.name!r}: keep what changes in a buffer, or in a tensor or a list of the module's own"
            )
        self.put(self.content)

    def change(self) -> Any:
        """What has happened to it since: attributes that were :class:`Bound`, items :class:`Added`, or its content."""
        return self.kind.change(self.value, self.content, self.now())

    def apply(self, change: Any) -> None:
        """Repeats what :meth:`change` returned."""
        if isinstance(change, Bound):
            bind(self.value, change)
        elif isinstance(change, Added):
            self.value.extend(change.items)
        else:
            self.put(change)

    def changed_names(self) -> list[str]:
        """The attributes of the module that a change shows in."""
        if self.kind in (TABLES, PARAMETER_HOOKS):
            found, now = [], self.now()
            for at in {**self.content, **now}:
                before, after = self.content.get(at, {}), now.get(at, {})
                names = [n for n in {**before, **after} if after.get(n, self) is not before.get(n, self)]
                found += [at + n if isinstance(n, str) else at for n in names]  # hooks have numbers
            return found
        names = [n for part in self.change() for n in part] if self.kind in MODULES else [""]
        return [".".join(filter(None, (self.name, name))) for name in names]

    def _parts(self) -> Iterable[tuple[Any, str, str]]:
        """Objects in the content, the attributes from which they are reached, and the ways from there."""
        if self.kind in MODULES:  # nobody changes what torch and Lightning have there
            at = f"{self.name}." if self.name else ""
            own = sorted(self.content.keys() - FRAMEWORK)
            return [(self.content[name], at + name, "") for name in own]
        return [(part, self.name, self.path + step) for step, part in self.kind.parts(self.content)]


class Objects:
    """Several objects."""

    objects: list[Object]

    def changed(self) -> list[Object]:
        """The objects that hold something else now."""
        return [found for found in self.objects if not found.is_same()]

    def restore(self) -> None:
        """Lets all objects hold what they held; metrics of which others see to their states apart."""
        for found in self.changed():
            found.restore()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Lets all objects hold what they held for a moment."""
        now = [(found, found.now()) for found in self.changed()]
        self.restore()
        try:
            yield
        finally:
            for found, content in now:
                found.put(content)


# ---- attributes


def attributes_of(value: Any) -> dict[str, Any]:
    """What is in ``__dict__`` and in slots."""
    slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def _difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> Bound:
    return Bound({n: v for n, v in now.items() if then.get(n, then) is not v}, [n for n in then if n not in now])


def bind(value: Any, change: Bound) -> None:
    """Binds attributes of an object, in slots or in ``__dict__``."""
    own, slots = getattr(value, "__dict__", {}), slots_of(type(value))
    for name in change.gone:
        if name in own:
            del own[name]
        elif name in slots and hasattr(value, name):
            object.__delattr__(value, name)
    for name, new in change.values.items():
        if name in slots:
            object.__setattr__(value, name, new)  # dataclasses may be frozen
        else:
            own[name] = new  # nn.Module's own way of setting one would register it


def _attributes(read: Callable[[Any], dict[str, Any]], same: Callable[[Any, Any], bool]) -> Kind:
    def write(value: Any, content: dict[str, Any]) -> None:
        bind(value, _difference(read(value), content))

    def parts(content: dict[str, Any]) -> list[Step]:  # copies may have their attributes in another order
        return [(f".{name}", content[name]) for name in sorted(content)]

    return Kind(read, same, write, parts, lambda value, then, now: _difference(then, now))


def _module_attributes(apart: frozenset[str]) -> Kind:
    def same(value: Any, content: dict[str, Any]) -> bool:  # called for every submodule before and after every visit
        own = vars(value)
        if not all(map(is_, map(own.get, content), content.values())):
            return False
        return bool(len(own) == len(content) + sum(map(own.__contains__, apart)))

    return _attributes(lambda value: {n: v for n, v in vars(value).items() if n not in apart}, same)


ATTRIBUTES = _attributes(attributes_of, lambda value, content: same_entries(attributes_of(value), content))
MODULE, LIGHTNING_MODULE = _module_attributes(_PARTS), _module_attributes(_OF_LIGHTNING)
METRIC = _attributes(beside_states, lambda metric, content: same_entries(beside_states(metric), content))
MODULES = (MODULE, LIGHTNING_MODULE)
NAMED = (ATTRIBUTES, METRIC, *MODULES)
"""Kinds of objects whose changes are :class:`Bound`."""

# ---- containers


def _items(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value.items())
    return set(value) if isinstance(value, set) else list(value)


def _same_items(value: Any, content: Any) -> bool:
    if isinstance(value, dict):
        return same_entries(value, content)
    if isinstance(value, set):
        return bool(value == content)
    return len(value) == len(content) and all(map(is_, value, content))


def _put_items(value: Any, content: Any) -> None:
    value.clear()
    if isinstance(value, (dict, set)):
        value.update(content)
    else:
        value.extend(content)


def _change_of_items(value: Any, then: Any, now: Any) -> Any:
    if isinstance(value, (list, deque)):
        full = isinstance(value, deque) and len(now) == value.maxlen  # the first items may have fallen out
        for dropped in range(len(then) + 1 if full else 1):
            rest = then[dropped:]
            if len(rest) <= len(now) and all(map(is_, rest, now)):
                return Added(now[len(rest) :])
    return now


def _parts_of_items(content: Any) -> Iterable[Step]:
    if not isinstance(content, dict):
        return numbered(content)
    keys = [(f"<{place}>", key) for place, key in enumerate(content)]  # numbers may be ids of this process
    return keys + [(f"[{k if isinstance(k, str) else at}]", v) for at, (k, v) in enumerate(content.items())]


ITEMS = Kind(_items, _same_items, _put_items, _parts_of_items, _change_of_items)


def _same_tables(tables: Any, content: Any) -> bool:
    filled = sum(map(bool, tables.values())) if content else any(tables.values())
    return bool(filled == len(content) and all(same_entries(tables[at], then) for at, then in content.items()))


def _put_tables(tables: Any, content: Any) -> None:
    for at, table in tables.items():
        table.clear()
        table.update(content.get(at, {}))


TABLES = Kind(
    lambda tables: {at: dict(table) for at, table in tables.items() if table}, _same_tables, _put_tables,
    lambda content: [(at + step, part) for at, table in content.items() for step, part in numbered(table.values())],
)  # fmt: skip
"""Dictionaries of torch's: submodules, buffers, hooks."""


def _parameter_hooks(parameters: Any) -> dict[str, dict[Any, Any]]:
    keys = ("_backward_hooks", "_post_accumulate_grad_hooks")
    found = {f"{name}.{key}": getattr(parameter, key) for name, parameter in parameters.items() for key in keys}
    return {at: hooks for at, hooks in found.items() if hooks is not None}


def _same_hooks(parameters: Any, content: Any) -> bool:
    if not content and not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters.values()):
        return True
    return _same_tables(_parameter_hooks(parameters), content)


PARAMETER_HOOKS = Kind(
    lambda parameters: TABLES.read(_parameter_hooks(parameters)), _same_hooks,
    lambda parameters, content: _put_tables(_parameter_hooks(parameters), content), TABLES.parts,
)  # fmt: skip
"""Hooks on gradients; a parameter has no dictionary before the first."""

# ---- all kinds


def same_entries(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    """Whether keys and values are the same objects in the same order."""
    return len(now) == len(then) and all(map(is_, now, then)) and all(map(is_, now.values(), then.values()))


_SLOTS: dict[type, tuple[str, ...]] = {}


def slots_of(kind: type) -> tuple[str, ...]:
    """The slots of a class, by the names under which objects have them: private ones are called ``_Class__name``."""
    if kind not in _SLOTS:
        slotted = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
        _SLOTS[kind] = tuple(n for own in slotted for n, m in own.items() if isinstance(m, MemberDescriptorType))
    return _SLOTS[kind]
