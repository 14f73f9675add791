# SPDX-License-Identifier: Apache-2.0
"""Mutable objects and what they held at a moment: compared, put back in place, and changed to what others hold."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from operator import is_
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from fl_lightning.lightning.module.generators import GENERATORS, generator_state, put_generator_state
from fl_lightning.lightning.names import Callback, LightningDataModule, Logger, SingleDeviceStrategy, Trainer

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, PurePath, enum.Enum, np.generic, np.dtype,
    torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis), MappingProxyType,
)  # fmt: skip
"""Values that never change inside."""

SHARED = (
    Trainer, SingleDeviceStrategy, Callback, LightningDataModule, Logger, Optimizer, Dataset, DataLoader, Metric,
    MetricCollection, ModuleType, FunctionType, BuiltinFunctionType, type, torch.Size,
    torch.optim.lr_scheduler.LRScheduler,
)  # fmt: skip
"""What a module refers to and does not own, and what others look after."""

_LIBRARIES = frozenset(
    ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics",
     "fl_lightning", "weakref", "logging", "re", "functools", "_thread", "threading")
)  # fmt: skip
"""Their objects are looked into only if they are modules, tensors, generators or containers."""

_SYSTEM = frozenset(
    ("io", "_io", "socket", "multiprocessing", "concurrent", "asyncio", "subprocess", "sqlite3", "mmap")
)
"""Their objects stand for something outside the process's own memory."""


class Kept(ABC):
    """One object and what it held when it was looked at.

    Args:
        value: the object.
        name: of the attribute of the module from which it was reached.

    Attributes:
        value: the object.
        name: of the attribute.
        content: what it held.
    """

    def __init__(self, value: Any, name: str) -> None:
        self.value, self.name = value, name
        self.content = self.now()

    @abstractmethod
    def now(self) -> Any:
        """What it holds now; later changes of the object do not reach it."""

    @abstractmethod
    def is_same(self) -> bool:
        """Whether it holds what it held."""

    @abstractmethod
    def put(self, content: Any) -> None:
        """Lets it hold what :meth:`now` returned."""

    def change(self) -> Any:
        """What :meth:`apply` needs to repeat what has happened to it since."""
        return self.now()

    def apply(self, change: Any) -> None:
        """Repeats what :meth:`change` returned."""
        self.put(change)

    def changed_names(self) -> list[str]:
        """The attributes of the module that a change shows in."""
        return [self.name]

    def new_lists(self, change: Any) -> dict[Any, Any]:
        """Lists and deques in a change under names that were not there."""
        return {}

    def bind(self, values: dict[Any, Any]) -> None:
        """Binds values to names."""

    def parts(self) -> Iterable[tuple[Any, str]]:
        """Objects in the content, and the attributes from which they are reached."""
        return ()


class Names(Kept):
    """Attributes of an object: in ``__dict__`` and in slots."""

    def now(self) -> dict[str, Any]:
        """See :meth:`Kept.now`."""
        value = self.value
        slots = {name: getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name)}
        return {**slots, **getattr(value, "__dict__", {})}

    def is_same(self) -> bool:
        """See :meth:`Kept.is_same`; values are looked at by themselves."""
        return _same_items(self.now(), self.content)

    def put(self, content: dict[str, Any]) -> None:
        """See :meth:`Kept.put`."""
        now = self.now()
        self.apply(
            ({n: v for n, v in content.items() if now.get(n, self) is not v}, [n for n in now if n not in content])
        )

    def change(self) -> tuple[dict[str, Any], list[str]]:
        """What is bound anew, and what is gone."""
        now, then = self.now(), self.content
        return {n: v for n, v in now.items() if then.get(n, self) is not v}, [n for n in then if n not in now]

    def apply(self, change: tuple[dict[str, Any], list[str]]) -> None:
        """See :meth:`Kept.apply`."""
        own, (bound, gone) = getattr(self.value, "__dict__", {}), change
        for name in gone:
            if name in own:
                del own[name]
            elif hasattr(self.value, name):
                object.__delattr__(self.value, name)
        for name, value in bound.items():
            if name in _slots_of(type(self.value)):
                object.__setattr__(self.value, name, value)  # dataclasses may be frozen
            else:
                own[name] = value  # nn.Module's own way of setting one would register it

    def new_lists(self, change: tuple[dict[str, Any], list[str]]) -> dict[str, Any]:
        """See :meth:`Kept.new_lists`."""
        return _lists_in(change[0], self.content)

    def bind(self, values: dict[str, Any]) -> None:
        """See :meth:`Kept.bind`."""
        self.apply((values, []))

    def parts(self) -> Iterable[tuple[Any, str]]:
        """See :meth:`Kept.parts`."""
        return ((value, self.name) for value in self.content.values())


class PartNames(Names):
    """Attributes of a submodule, apart from what torch, Lightning and this package keep in it for themselves."""

    def now(self) -> dict[str, Any]:
        """See :meth:`Kept.now`."""
        return {name: value for name, value in vars(self.value).items() if name not in NOT_ATTRIBUTES}

    def is_same(self) -> bool:
        """See :meth:`Kept.is_same`; called for every submodule before and after every visit."""
        own, content = vars(self.value), self.content
        if not all(map(is_, map(own.get, content), content.values())):
            return False
        return len(own) == len(content) + len(NOT_ATTRIBUTES & own.keys())

    def changed_names(self) -> list[str]:
        """See :meth:`Kept.changed_names`."""
        bound, gone = self.change()
        return [f"{self.name}.{name}" if self.name else name for name in (*bound, *gone)]

    def parts(self) -> Iterable[tuple[Any, str]]:
        """See :meth:`Kept.parts`."""
        at = f"{self.name}." if self.name else ""
        return ((value, at + name) for name, value in self.content.items())


NOT_ATTRIBUTES = frozenset(
    {"_parameters", "_buffers", "_modules", "_trainer", "_fabric", "_current_fx_name", "_metric_attributes"}
    | {"log", "log_dict", "federated_features", "_non_persistent_buffers_set"}
)
"""What belongs to parameters and buffers, and what is another at every moment."""


class Items(Kept):
    """Items of a list, a deque, a dictionary or a set."""

    def now(self) -> Any:
        """See :meth:`Kept.now`."""
        value = self.value
        if isinstance(value, dict):
            return dict(value.items())
        return set(value) if isinstance(value, set) else list(value)

    def is_same(self) -> bool:
        """See :meth:`Kept.is_same`; items are looked at by themselves."""
        value, content = self.value, self.content
        if isinstance(value, dict):
            return _same_items(value, content)
        if isinstance(value, set):
            return bool(value == content)
        return len(value) == len(content) and all(map(is_, value, content))

    def put(self, content: Any) -> None:
        """See :meth:`Kept.put`."""
        value = self.value
        value.clear()
        if isinstance(value, (dict, set)):
            value.update(content)
        else:
            value.extend(content)

    def new_lists(self, change: Any) -> dict[Any, Any]:
        """See :meth:`Kept.new_lists`."""
        return _lists_in(change, self.content) if isinstance(self.value, dict) else {}

    def bind(self, values: dict[Any, Any]) -> None:
        """See :meth:`Kept.bind`."""
        if values:
            self.value.update(values)

    def parts(self) -> Iterable[tuple[Any, str]]:
        """See :meth:`Kept.parts`."""
        content = self.content
        values = [*content.keys(), *content.values()] if isinstance(content, dict) else content
        return ((value, self.name) for value in values)

    def change(self) -> Any:
        """What was added at the end, if nothing else has happened; else what it holds now."""
        content = self.now()
        added = self._added(content)
        return content if added is None else Added(added)

    def apply(self, change: Any) -> None:
        """See :meth:`Kept.apply`."""
        if isinstance(change, Added):
            self.value.extend(change.items)
        else:
            self.put(change)

    def _added(self, content: Any) -> list[Any] | None:
        """What was added; from a deque with a limit the first items may have fallen out meanwhile."""
        before, value = self.content, self.value
        if not isinstance(value, (list, deque)):
            return None
        full = isinstance(value, deque) and len(content) == value.maxlen
        for dropped in range(len(before) + 1 if full else 1):
            rest = before[dropped:]
            if len(rest) <= len(content) and all(map(is_, rest, content)):
                return list(content[len(rest) :])
        return None


@dataclass
class Added:
    """Items that were added to a list or a deque."""

    items: list[Any]


class Numbers(Kept):
    """What is in a tensor."""

    def now(self) -> Tensor:
        """See :meth:`Kept.now`."""
        copied: Tensor = self.value.detach().clone()
        return copied

    def is_same(self) -> bool:
        """See :meth:`Kept.is_same`."""
        value, content = self.value.detach(), self.content
        if value.shape != content.shape or value.dtype != content.dtype or value.device != content.device:
            return False
        if value.layout != torch.strided:
            value, content = value.to_dense(), content.to_dense()
        return torch.equal(value, content) or bool(
            ((value == content) | ((value != value) & (content != content))).all()
        )

    @torch.no_grad()
    def put(self, content: Tensor) -> None:
        """See :meth:`Kept.put`."""
        value = self.value.data if self.value.layout == torch.strided else self.value
        if value.shape == content.shape and value.dtype == content.dtype and value.device == content.device:
            value.copy_(content)
        else:
            self.value.data = content.clone()


class Array(Kept):
    """What is in an array of numpy."""

    def now(self) -> Any:
        """See :meth:`Kept.now`."""
        return self.value.copy()

    def is_same(self) -> bool:
        """See :meth:`Kept.is_same`."""
        value, content = self.value, self.content
        if value.dtype.hasobject:
            return value.shape == content.shape and all(map(is_, value.ravel().tolist(), content.ravel().tolist()))
        return bool(value.shape == content.shape and value.tobytes() == content.tobytes())

    def put(self, content: Any) -> None:
        """See :meth:`Kept.put`."""
        if self.value.shape != content.shape:
            self.value.resize(content.shape, refcheck=False)
        self.value[...] = content

    def parts(self) -> Iterable[tuple[Any, str]]:
        """See :meth:`Kept.parts`."""
        return ((item, self.name) for item in self.content.ravel().tolist()) if self.content.dtype.hasobject else ()


class Bytes(Kept):
    """What is in a ``bytearray`` or an ``array.array``."""

    def now(self) -> Any:
        """See :meth:`Kept.now`."""
        return self.value[:]

    def is_same(self) -> bool:
        """See :meth:`Kept.is_same`."""
        return bool(self.value == self.content)

    def put(self, content: Any) -> None:
        """See :meth:`Kept.put`."""
        self.value[:] = content


class Draws(Kept):
    """Where a random generator is."""

    def now(self) -> Any:
        """See :meth:`Kept.now`."""
        return generator_state(self.value)

    def is_same(self) -> bool:
        """See :meth:`Kept.is_same`."""
        now = self.now()
        return torch.equal(now, self.content) if isinstance(now, Tensor) else repr(now) == repr(self.content)

    def put(self, content: Any) -> None:
        """See :meth:`Kept.put`."""
        put_generator_state(self.value, content)


def _same_items(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    """Whether keys and values are the same objects in the same order."""
    return len(now) == len(then) and all(map(is_, now, then)) and all(map(is_, now.values(), then.values()))


def _lists_in(values: dict[Any, Any], known: dict[Any, Any]) -> dict[Any, Any]:
    return {name: value for name, value in values.items() if type(value) in (list, deque) and name not in known}


_SLOTS: dict[type, tuple[str, ...]] = {}


def _slots_of(kind: type) -> tuple[str, ...]:
    """The slots of a class, by the names under which objects have them: private ones are called ``_Class__name``."""
    if kind not in _SLOTS:
        slotted = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
        _SLOTS[kind] = tuple(n for own in slotted for n, m in own.items() if isinstance(m, MemberDescriptorType))
    return _SLOTS[kind]


_VALUES: tuple[tuple[Any, type[Kept]], ...] = (
    (GENERATORS, Draws),
    (np.ndarray, Array),
    ((bytearray, array), Bytes),
    ((list, deque, dict, set), Items),
)


def kinds_of(value: Any) -> tuple[type[Kept], ...] | None:
    """How an object is kept: not at all, or by what it holds, by its attributes, or by both; ``None``: it cannot be."""
    if isinstance(value, SHARED):
        return ()
    if isinstance(value, Tensor):
        # A tensor with a graph is a result. Nobody writes into it.
        plain = value.grad_fn is None and not (value.is_inference() or value.is_meta or value.is_quantized)
        return (Numbers,) if plain else ()
    for types, kind in _VALUES:
        if isinstance(value, types):
            writable = kind is not Array or value.flags.writeable
            return (*((kind,) if writable else ()), *((Names,) if hasattr(value, "__dict__") else ()))
    if isinstance(value, nn.Module):
        return (Names,)
    home = type(value).__module__.partition(".")[0]
    if hasattr(value, "__next__") or home in _SYSTEM:
        return None
    return (Names,) if home not in _LIBRARIES and (hasattr(value, "__dict__") or _slots_of(type(value))) else ()


def held_by(value: Any) -> Iterable[Any] | None:
    """What an object holds that never changes itself; ``None`` if it may."""
    if isinstance(value, (tuple, frozenset)):
        return value
    if isinstance(value, partial):
        return (value.func, value.args, value.keywords)
    return (value.__self__,) if isinstance(value, MethodType) else None
