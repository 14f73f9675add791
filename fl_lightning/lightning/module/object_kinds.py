# SPDX-License-Identifier: Apache-2.0
"""Kinds of mutable objects: how what they hold is read, compared and written back in place."""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import is_
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from fl_lightning.lightning.metric_state import beside_states
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

_NOT_ATTRIBUTES = frozenset(
    {"_parameters", "_buffers", "_modules", "_trainer", "_fabric", "_current_fx_name", "_metric_attributes"}
    | {"log", "log_dict", "federated_features", "_non_persistent_buffers_set"}
)
"""What belongs to parameters and buffers, and what is another at every moment."""


@dataclass(frozen=True)
class How:
    """How objects of one kind are looked at.

    Attributes:
        read: what an object holds; its later changes do not reach that.
        same: whether it still holds that.
        write: lets it hold that.
        parts: the objects in what it holds.
        of_names: it holds attributes, by name.
    """

    read: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], None]
    parts: Callable[[Any], Iterable[Any]] = lambda content: ()
    of_names: bool = False


# ---- names: attributes in __dict__ and in slots

_SLOTS: dict[type, tuple[str, ...]] = {}


def _slots_of(kind: type) -> tuple[str, ...]:
    """The slots of a class, by the names under which objects have them: private ones are called ``_Class__name``."""
    if kind not in _SLOTS:
        slotted = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
        _SLOTS[kind] = tuple(n for own in slotted for n, m in own.items() if isinstance(m, MemberDescriptorType))
    return _SLOTS[kind]


class Bound(NamedTuple):
    """Attributes that were bound anew, and those that are gone."""

    values: dict[str, Any]
    gone: list[str]

    @classmethod
    def between(cls, then: dict[str, Any], now: dict[str, Any]) -> Bound:
        """What turns some attributes into others."""
        return cls({n: v for n, v in now.items() if then.get(n, cls) is not v}, [n for n in then if n not in now])

    def apply(self, value: Any) -> None:
        """Does the same to an object."""
        own = getattr(value, "__dict__", {})
        for name in self.gone:
            if name in own:
                del own[name]
            elif hasattr(value, name):
                object.__delattr__(value, name)
        for name, item in self.values.items():
            if name in _slots_of(type(value)):
                object.__setattr__(value, name, item)  # dataclasses may be frozen
            else:
                own[name] = item  # nn.Module's own way of setting one would register it


def _names(read: Callable[[Any], dict[str, Any]], same: Callable[[Any, Any], bool] | None = None) -> How:
    def write(value: Any, content: dict[str, Any]) -> None:
        Bound.between(read(value), content).apply(value)

    same = same or (lambda value, content: _same_entries(read(value), content))
    return How(read, same, write, lambda content: content.values(), of_names=True)


def _attributes(value: Any) -> dict[str, Any]:
    slots = {name: getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def _same_entries(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    """Whether keys and values are the same objects in the same order."""
    return len(now) == len(then) and all(map(is_, now, then)) and all(map(is_, now.values(), then.values()))


def _same_part(value: nn.Module, content: dict[str, Any]) -> bool:
    own = vars(value)  # of every submodule before and after every visit: nothing is copied
    if not all(map(is_, map(own.get, content), content.values())):
        return False
    return len(own) == len(content) + len(_NOT_ATTRIBUTES & own.keys())


NAMES = _names(_attributes)
"""Attributes of an object."""
PART = _names(lambda part: {n: v for n, v in vars(part).items() if n not in _NOT_ATTRIBUTES}, _same_part)
"""Attributes of a submodule, apart from what torch, Lightning and this package keep in it for themselves."""
METRIC = _names(beside_states)
"""What a metric keeps beside states that can be joined."""


# ---- contents


def _items(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value.items())
    return set(value) if isinstance(value, set) else list(value)


def _same_items(value: Any, content: Any) -> bool:
    if isinstance(value, dict):
        return _same_entries(value, content)
    if isinstance(value, set):
        return bool(value == content)
    return len(value) == len(content) and all(map(is_, value, content))


def _refill(value: Any, content: Any) -> None:
    value.clear()
    if isinstance(value, (dict, set)):
        value.update(content)
    else:
        value.extend(content)


def _same_numbers(tensor: Tensor, content: Tensor) -> bool:
    tensor = tensor.detach()
    if tensor.shape != content.shape or tensor.dtype != content.dtype or tensor.device != content.device:
        return False
    if tensor.layout != torch.strided:
        tensor, content = tensor.to_dense(), content.to_dense()
    return torch.equal(tensor, content) or bool(
        ((tensor == content) | ((tensor != tensor) & (content != content))).all()
    )


@torch.no_grad()
def _put_numbers(tensor: Tensor, content: Tensor) -> None:
    value = tensor.data if tensor.layout == torch.strided else tensor
    if value.shape == content.shape and value.dtype == content.dtype and value.device == content.device:
        value.copy_(content)
    else:
        tensor.data = content.clone()


def _same_array(value: Any, content: Any) -> bool:
    if value.dtype.hasobject:
        return value.shape == content.shape and all(map(is_, value.ravel().tolist(), content.ravel().tolist()))
    return bool(value.shape == content.shape and value.tobytes() == content.tobytes())


def _put_array(value: Any, content: Any) -> None:
    if value.shape != content.shape:
        value.resize(content.shape, refcheck=False)
    value[...] = content


def _same_draws(generator: Any, state: Any) -> bool:
    now = generator_state(generator)
    return torch.equal(now, state) if isinstance(now, Tensor) else repr(now) == repr(state)


ITEMS = How(
    _items, _same_items, _refill, lambda c: [*c.keys(), *c.values()] if isinstance(c, dict) else c
)  # fmt: skip
"""Items of a list, a deque, a dictionary or a set."""
NUMBERS = How(lambda tensor: tensor.detach().clone(), _same_numbers, _put_numbers)
"""What is in a tensor."""
_ARRAY = How(
    np.ndarray.copy,
    _same_array,
    _put_array,
    lambda content: content.ravel().tolist() if content.dtype.hasobject else (),
)
_BYTES = How(
    lambda value: value[:], lambda value, content: bool(value == content), lambda v, c: v.__setitem__(slice(None), c)
)
_DRAWS = How(generator_state, _same_draws, put_generator_state)
_VALUES: tuple[tuple[Any, How], ...] = (
    (GENERATORS, _DRAWS), (np.ndarray, _ARRAY), ((bytearray, array), _BYTES), ((list, deque, dict, set), ITEMS),
)  # fmt: skip


def kinds_of(value: Any) -> tuple[How, ...] | None:
    """How an object is kept: not at all, or by what it holds, by its attributes, or by both; ``None``: it cannot be."""
    if isinstance(value, SHARED):
        return ()
    if isinstance(value, Tensor):
        # A tensor with a graph is a result. Nobody writes into it.
        plain = value.grad_fn is None and not (value.is_inference() or value.is_meta or value.is_quantized)
        return (NUMBERS,) if plain else ()
    for types, kind in _VALUES:
        if isinstance(value, types):
            writable = kind is not _ARRAY or value.flags.writeable
            return (*((kind,) if writable else ()), *((NAMES,) if hasattr(value, "__dict__") else ()))
    if isinstance(value, nn.Module):
        return (NAMES,)
    home = type(value).__module__.partition(".")[0]
    if hasattr(value, "__next__") or home in _SYSTEM:
        return None
    return (NAMES,) if home not in _LIBRARIES and (hasattr(value, "__dict__") or _slots_of(type(value))) else ()


def held_by(value: Any) -> Iterable[Any] | None:
    """What an object holds that never changes itself; ``None`` if it may."""
    if isinstance(value, (tuple, frozenset)):
        return value
    if isinstance(value, partial):
        return (value.func, value.args, value.keywords)
    return (value.__self__,) if isinstance(value, MethodType) else None
