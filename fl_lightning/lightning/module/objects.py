# SPDX-License-Identifier: Apache-2.0
"""Objects that a module leads to, and what they held at a moment: compared, put back in place, changed as elsewhere."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from itertools import repeat
from operator import is_
from pathlib import PurePath
from types import MappingProxyType, MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.lightning.names import LightningModule

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, PurePath, enum.Enum, np.generic, np.dtype,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type(Ellipsis), MappingProxyType,
)  # fmt: skip
"""Values that never change inside."""
FRAMEWORK = frozenset((*vars(nn.Module()), *vars(LightningModule()), "_hparams_initial"))
"""Attributes of modules that belong to torch and Lightning."""
_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_OF_LIGHTNING = _TABLES | {
    "_trainer", "_fabric", "_current_fx_name", "_metric_attributes", "log", "log_dict", "federated_features",
}  # fmt: skip
"""What is another at every moment, too."""

Edit = tuple[str, list[Any]]
"""What has happened to an object: ``"bound", [name, value]`` and ``"gone", [name]`` of attributes, items ``"added"`` to
the end, or the ``"whole"`` content, in a list of one."""


class Object:
    """One object and what it held when it was looked at.

    ``name`` is the module's attribute that leads to it, and ``path`` the way to it from there.
    """

    gathers = True  # from step to step
    """Whether what it holds may tell of samples."""

    def __init__(self, value: Any, name: str, path: str = "") -> None:
        self.value, self.name, self.path = value, name, path
        self.content = self.read()

    def read(self) -> Any:
        """What it holds now; later changes do not reach that."""
        return self.value.detach().clone()

    def is_same(self) -> bool:
        """Whether it holds what it held; objects in it are looked at by themselves."""
        return bool(self.read() == self.content)

    def put(self, content: Any) -> None:
        """Lets it hold what :meth:`read` returned."""
        raise NotImplementedError

    def restore(self) -> None:
        """Lets it hold what it held."""
        self.put(self.content)

    def parts(self) -> Iterable[tuple[Any, str, str]]:
        """Objects in the content, the attributes that lead to them, and the ways from there."""
        return ()

    def edits(self) -> list[Edit]:
        """What has happened to it since."""
        return [("whole", [self.read()])]

    def apply(self, form: str, values: list[Any]) -> None:
        """Repeats one of the :meth:`edits`."""
        self.put(values[0])

    def changed_names(self) -> list[str]:
        """The attributes of the module that a change shows in."""
        return [self.name]


class Attributes(Object):
    """The attributes of an object, in ``__dict__`` and slots, but for those that are ``apart``."""

    def __init__(self, value: Any, name: str, path: str = "", apart: frozenset[str] = frozenset()) -> None:
        self._apart, self._slots = apart, slots_of(type(value))
        super().__init__(value, name, path)

    def read(self) -> dict[str, Any]:
        """By name."""
        own = {name: value for name, value in getattr(self.value, "__dict__", {}).items() if name not in self._apart}
        return {name: getattr(self.value, name) for name in self._slots if hasattr(self.value, name)} | own

    def is_same(self) -> bool:
        """Called for every submodule before and after every visit."""
        own: dict[str, Any] = self.read() if self._slots else vars(self.value)
        then = self.content
        if not all(map(is_, map(own.get, then, repeat(self)), then.values())):
            return False
        return bool(len(own) == len(then) + sum(map(own.__contains__, self._apart)))

    def put(self, content: dict[str, Any]) -> None:
        """Binds them, and deletes others."""
        now = self.read()
        edits: list[Edit] = [("gone", [name]) for name in now if name not in content]
        for edit in edits + [("bound", [n, v]) for n, v in content.items() if now.get(n, self) is not v]:
            self.apply(*edit)

    def parts(self) -> Iterable[tuple[Any, str, str]]:
        """Copies may have their attributes in another order."""
        return [(self.content[name], self.name, f"{self.path}.{name}") for name in sorted(self.content)]

    def edits(self) -> list[Edit]:
        """Of attributes that mean something else now: caches are bound to the same again."""
        then, now = self.content, self.read()
        bound: list[Edit] = [("bound", [n, v]) for n, v in now.items() if not is_equal(v, then.get(n, self))]
        return bound + [("gone", [name]) for name in then if name not in now]

    def apply(self, form: str, values: list[Any]) -> None:
        """Binds one, or deletes it."""
        name, own = values[0], getattr(self.value, "__dict__", {})
        if form == "bound" and name in self._slots:
            object.__setattr__(self.value, name, values[1])  # dataclasses may be frozen
        elif form == "bound":
            own[name] = values[1]  # nn.Module's own way of setting one would register it
        elif name in own:
            del own[name]
        elif name in self._slots and hasattr(self.value, name):
            object.__delattr__(self.value, name)

    def shown_as(self, name: str) -> str:
        """The module's attribute that one of them shows in."""
        return self.name

    def changed_names(self) -> list[str]:
        """The module's attributes that mean something else now."""
        return [self.shown_as(values[0]) for _, values in self.edits()]


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


def equal_numbers(one: Tensor, other: Tensor) -> Tensor:
    """Elementwise equality, with NaN equal to NaN."""
    return (one == other) | ((one != one) & (other != other))


def same_numbers(tensor: Tensor, content: Tensor) -> bool:
    """Whether two tensors are alike and hold the same numbers, NaN among them."""
    tensor = tensor.detach()
    if (tensor.shape, tensor.dtype, tensor.device) != (content.shape, content.dtype, content.device):
        return False
    if tensor.layout != torch.strided:
        tensor, content = tensor.to_dense(), content.to_dense()
    return torch.equal(tensor, content) or bool(equal_numbers(tensor, content).all())


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are one, or mean the same: plain ones, tensors, tuples of these, empty containers."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Tensor):
        return same_numbers(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, (list, dict, set)):
        return not one and not other
    return isinstance(one, PLAIN) and (bool(one == other) or bool(one != one and other != other))
