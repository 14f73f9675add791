# SPDX-License-Identifier: Apache-2.0
"""Notices what an evaluation changes in Python objects that cannot be copied."""

from __future__ import annotations

import marshal
import random
import zlib
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from fl_lightning.core.modules import submodules
from fl_lightning.lightning.module.module_state import plain_attributes
from fl_lightning.lightning.names import Trainer

_PLAIN = (type(None), bool, int, str, bytes, complex, torch.dtype, torch.device)
_OPAQUE = (Trainer, Metric, Optimizer, ModuleType, FunctionType, BuiltinFunctionType, MethodType, type)
_BARE = (dict, list, tuple, deque)  # have no attributes
_LONG = 256  # items of a container that are looked at one by one where there is a faster way
_DEEP = 6
_MANY = 5000  # objects behind one name; the rest count as long as they are the same
_SMALL = 2**16  # bytes of a tensor; of larger ones only what PyTorch counts as a change
_LARGE = 2**26  # bytes of an array; of larger ones only the place and the shape count


class Fingerprint:
    """Values by name that compare equal as long as the objects behind them stay as they are.

    Tensors and unknown objects count as changed when others take their places, or when torch counts a change in place.
    So do the items of containers with more than 5000, unless they are containers of numbers and strings. Modules are
    looked into.

    Args:
        apart: objects whose contents do not count.

    Attributes:
        values: what is compared.
    """

    def __init__(self, apart: Iterable[object] = ()) -> None:
        self.values: dict[str, Any] = {}
        self._apart = {id(value) for value in apart}
        self._kept: list[Any] = []  # objects whose ids are compared: nothing else may get these ids
        self._seen: set[int] = set()
        self._slots: dict[type, list[str]] = {}
        self._left = 0

    def add(self, name: str, value: object) -> None:
        """Adds one object."""
        self._seen, self._left = set(), _MANY
        self.values[name] = self._value(value, 0)

    def changes(self, later: Fingerprint) -> list[str]:
        """Names whose values differ."""
        now, then = later.values, self.values
        if now == then:
            return []
        return sorted(name for name in now.keys() | then.keys() if now.get(name, self) != then.get(name, self))

    def _value(self, value: Any, depth: int) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, float):
            return repr(value)  # NaN must equal NaN
        if isinstance(value, Tensor):
            return self._tensor(value), _bits(value)
        if id(value) in self._apart:
            return type(value), "apart"
        if isinstance(value, PurePath):
            return str(value)  # its slots are caches
        self._left -= 1
        if depth > _DEEP or self._left < 0 or isinstance(value, _OPAQUE):
            return self._id(value)
        if isinstance(value, nn.Module):
            return self._id(value), self._parts_of(value, depth + 1)
        if isinstance(value, (Mapping, list, tuple, deque, set, frozenset)) and len(value) > _LONG:
            return type(value), len(value), self._long(value, depth + 1)
        if isinstance(value, Mapping):
            items = tuple((self._value(k, depth + 1), self._value(v, depth + 1)) for k, v in value.items())
            return dict, items, self._attributes(value, depth + 1)
        if isinstance(value, (list, tuple, deque)):
            found = tuple(self._value(item, depth + 1) for item in value)
            return type(value), found, self._attributes(value, depth + 1)
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(self._value(item, depth + 1) for item in value)
        if isinstance(value, np.ndarray):
            return self._id(value), value.shape, self._array(value, depth + 1)
        if isinstance(value, (bytearray, array)):
            return self._id(value), zlib.crc32(value)
        state = _generator_state(value)
        if state is not None:
            return state
        if id(value) in self._seen:  # objects may refer to each other
            return self._id(value)
        self._seen.add(id(value))
        if isinstance(value, partial):
            parts = value.func, value.args, value.keywords
            return self._id(value), tuple(self._value(part, depth + 1) for part in parts)
        return self._id(value), self._attributes(value, depth + 1)

    def _attributes(self, value: object, depth: int) -> Any:
        """What an object keeps in ``__dict__`` and in slots; ``None`` if it has neither."""
        if type(value) in _BARE:
            return None
        kind, own = type(value), getattr(value, "__dict__", None)
        if kind not in self._slots:
            self._slots[kind] = _slots_of(kind)
        kept = tuple((n, self._value(getattr(value, n), depth)) for n in self._slots[kind] if hasattr(value, n))
        return self._value(own, depth) if isinstance(own, dict) and own else None, kept

    def _array(self, value: Any, depth: int) -> Any:
        """What is in an array; of one of objects, what is in them."""
        if value.dtype.hasobject:
            return self._value(value.ravel().tolist(), depth)
        return zlib.crc32(value.tobytes()) if value.nbytes <= _LARGE else None

    def _parts_of(self, module: nn.Module, depth: int) -> Any:
        """What is in a module and its submodules, those apart that were looked into before."""
        found = []
        for _, part in submodules(module):
            if id(part) not in self._seen:
                self._seen.add(id(part))
                values: dict[str, Any] = {**part._parameters, **part._buffers}
                if not isinstance(part, Metric):
                    values |= plain_attributes(part, framework=True)
                found.append((self._id(part), tuple((name, self._value(v, depth)) for name, v in values.items())))
        return tuple(found)

    def _long(self, value: Collection[Any], depth: int) -> Any:
        """Which objects there are, and what is in them if they are plain or no more than 5000."""
        items: list[Any] = [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)
        if any(not issubclass(kind, (*_PLAIN, float)) for kind in set(map(type, items))):
            try:
                return zlib.crc32(marshal.dumps(items, 2))  # later versions write down how often an object is in use
            except ValueError:  # no plain objects
                if len(items) <= _MANY:
                    return tuple(self._value(item, depth) for item in items)
        self._kept.append(items)
        return tuple(map(id, items))

    def _tensor(self, value: Tensor) -> Any:
        try:
            pointer = value.data_ptr()
        except RuntimeError:  # sparse tensors have no memory of their own; their version counts changes all the same
            pointer = 0
        return self._id(value), pointer, 0 if value.is_inference() else value._version

    def _id(self, value: object) -> int:
        self._kept.append(value)
        return id(value)


def _slots_of(kind: type) -> list[str]:
    """The slots of a class, by the names under which objects have them: private ones are called ``_Class__name``."""
    slotted = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [name for own in slotted for name, member in own.items() if isinstance(member, MemberDescriptorType)]


def _bits(value: Tensor) -> int:
    """What is in a small tensor in this process's memory; writes through ``.data`` and ``.numpy()`` are not counted."""
    plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_quantized
    if not plain or value.device.type != "cpu" or not 0 < value.nbytes <= _SMALL:
        return 0
    return zlib.crc32(value.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy().tobytes())


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    return value.getstate() if isinstance(value, random.Random) else None
