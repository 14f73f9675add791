# SPDX-License-Identifier: Apache-2.0
"""Values of a module written with tensors, numbers, strings and lists alone, and made of these again.

A value is a number, a string or ``None`` itself, or the place of an earlier node, or the name of an object that both
sides have. Nothing is unpickled, and no class is imported: objects are of classes that the reader's module has already.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.federation.door import CHARACTERS, STATE_BYTES, STATE_ENTRIES
from fl_lightning.lightning.module.kept_objects import Names, kinds_of
from fl_lightning.lightning.module.object_state import is_reserved

_PLAIN = (type(None), bool, float, str)
_LISTS: dict[str, Callable[..., Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Callable[..., Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_FACTORIES: dict[str | None, Any] = {None: None, **{kind.__name__: kind for kind in (list, dict, set, int, float)}}
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
"""Of tensors in messages."""
_NUMBERS = re.compile(r"[<>|=]?[biufc]\d{1,2}")
_AWAY = "_lives_on_device"


class StaysError(Exception):
    """A value cannot be written; says why."""


def is_own_name(owner: object, name: object) -> bool:
    """Whether somebody else may bind this attribute: it hides nothing of the class's code, and no part of a module."""
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("__") or len(name) > 200:
        return False
    if isinstance(owner, nn.Module) and is_reserved(owner, name):
        return False
    found = getattr(type(owner), name, None)
    return not callable(found) and (not hasattr(found, "__get__") or type(found).__name__ == "member_descriptor")


class Writer:
    """Writes values into ``nodes``.

    ``known`` are names of objects that the reader has, too, by their ids, and ``classes`` those of objects that it can
    make. ``gathered`` counts values in tensors, arrays and containers, single numbers apart.
    """

    def __init__(self, known: Mapping[int, str], classes: Mapping[str, type]) -> None:
        self._known, self._classes = known, classes
        self.nodes: list[list[Any]] = []
        self._written: list[Any] = []
        self._at: dict[int, int] = {}
        self._open: set[int] = set()
        self.entries = self.nbytes = self.gathered = 0

    def tried(self, values: Iterable[Any]) -> list[Any]:
        """Writes values, all or none of them; raises StaysError if one of them cannot be written."""
        before, done = (len(self.nodes), self.entries, self.nbytes), len(self._written)
        try:
            return [self.of(value) for value in values]
        except (StaysError, RecursionError) as error:
            del self.nodes[before[0] :]
            self.entries, self.nbytes = before[1:]
            for value in self._written[done:]:
                self._at.pop(id(value), None)
            del self._written[done:]
            self._open.clear()
            raise StaysError(str(error) or type(error).__name__) from None

    def of(self, value: Any) -> Any:
        """A value; raises StaysError if it cannot be written."""
        self._count(1, 0)
        if type(value) is str and len(value) > CHARACTERS:
            raise StaysError(f"a string of {len(value)} characters")
        if type(value) in _PLAIN or (type(value) is int and -(2**63) <= value < 2**63):
            return value
        if id(value) in self._known:
            return {"known": self._known[id(value)]}
        if id(value) not in self._at:
            if id(value) in self._open:
                raise StaysError("an object that holds itself")
            self._open.add(id(value))
            node = self._node(value)
            self._open.discard(id(value))
            self._at[id(value)] = len(self.nodes)
            self._written.append(value)  # alive, so that its id stays its own
            self.nodes.append(node)
        return {"node": self._at[id(value)]}

    def _count(self, entries: int, nbytes: int) -> None:
        self.entries += entries
        self.nbytes += nbytes
        if self.entries > STATE_ENTRIES or self.nbytes > STATE_BYTES:
            raise StaysError(f"more than {STATE_ENTRIES} entries or {STATE_BYTES >> 20} MiB in all")

    def _node(self, value: Any) -> list[Any]:
        kind = type(value)
        name = kind.__name__
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is int:
            return ["int", hex(value)]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind in (bytes, bytearray):
            return [name, self._bytes(value)]
        if kind is array:
            return ["array", value.typecode, self._bytes(value.tobytes())]
        if isinstance(value, (np.ndarray, np.generic)):
            if value.dtype.kind not in "biufc" or kind.__module__ != "numpy":
                raise StaysError(f"an array of {value.dtype}")
            self.gathered += value.size if value.ndim else 0
            return ["ndarray", value.dtype.str, list(value.shape), self._bytes(value.tobytes()), name != "ndarray"]
        if kind in _LISTS.values() or kind in _MAPPINGS.values() or kind in (deque, defaultdict):
            self.gathered += len(value)
        if kind in _LISTS.values():
            return [name, self._all(value)]
        if kind is deque:
            return [name, self._all(value), value.maxlen]
        if kind in _MAPPINGS.values():
            return [name, self._all(part for pair in value.items() for part in pair)]
        if kind is defaultdict and value.default_factory in _FACTORIES.values():
            factory = getattr(value.default_factory, "__name__", None)
            return [name, self._all(part for pair in value.items() for part in pair), factory]
        return self._object(value)

    def _object(self, value: Any) -> list[Any]:
        kind, name = type(value), type(value).__qualname__
        if self._classes.get(name) is kind and isinstance(value, tuple):
            return ["named", name, self._all(value)]
        if self._classes.get(name) is kind and kinds_of(value) == (Names,) and not isinstance(value, nn.Module):
            own = {key: part for key, part in Names(value, "").content.items() if is_own_name(value, key)}
            return ["object", name, self._all(part for pair in own.items() for part in pair)]
        raise StaysError(f"a {kind.__name__}")

    def _all(self, values: Iterable[Any]) -> list[Any]:
        return [self.of(value) for value in values]

    def _tensor(self, value: Tensor) -> list[Any]:
        if value.dtype not in DTYPES or value.is_quantized or value.is_meta or type(value) is not Tensor:
            raise StaysError(f"a {type(value).__name__} of {value.dtype}")
        away = value.device.type != "cpu" or hasattr(value, _AWAY)
        sparse = value.layout != torch.strided
        plain = value.detach().to_dense() if sparse else value.detach()
        self._count(0, plain.nbytes)
        self.gathered += plain.numel() if plain.dim() else 0
        return ["sparse" if sparse else "tensor", plain.cpu().contiguous(), away]

    def _bytes(self, value: bytes | bytearray) -> Tensor:
        self._count(0, len(value))
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)


class Reader:
    """Makes values of what a :class:`Writer` has written; anything may be raised where it was somebody else.

    ``device`` is for tensors that were not in the writer's own memory.
    """

    def __init__(
        self, nodes: Sequence[Any], known: Mapping[str, Any], classes: Mapping[str, type], device: torch.device
    ) -> None:
        self._known, self._classes, self._device = known, classes, device
        self._made: list[Any] = []
        for kind, *parts in nodes:
            self._made.append(self._value(kind, *parts))

    def of(self, written: Any) -> Any:
        """A value."""
        if not isinstance(written, Mapping):
            return written
        ((kind, place),) = written.items()
        if kind == "known":
            return self._known[place]
        if kind != "node" or not 0 <= place < len(self._made):  # only what is made already: nothing holds itself
            raise ValueError(f"nodes hold earlier ones, found {kind} {place}")
        return self._made[place]

    def all(self, written: Sequence[Any]) -> list[Any]:
        """Values."""
        return [self.of(value) for value in written]

    def pairs(self, written: Sequence[Any]) -> dict[Any, Any]:
        """Keys and values, one after the other."""
        values = iter(self.all(written))
        return dict(zip(values, values, strict=True))

    def _value(self, kind: str, *parts: Any) -> Any:
        if kind in _LISTS:
            return _LISTS[kind](self.all(parts[0]))
        if kind in _MAPPINGS:
            return _MAPPINGS[kind](self.pairs(parts[0]))
        return _MAKERS[kind](self, *parts)

    def _tensor(self, value: Tensor, away: bool) -> Tensor:
        made = value.detach().clone().to(self._device if away else "cpu")
        if away:
            setattr(made, _AWAY, True)  # a server on the CPU passes it on to clients on GPUs
        return made

    def _ndarray(self, dtype: str, shape: list[int], value: Tensor, is_scalar: bool) -> Any:
        if not _NUMBERS.fullmatch(dtype):
            raise ValueError(f"arrays hold numbers, found {dtype}")
        made = np.frombuffer(value.numpy().tobytes(), dtype).reshape(shape).copy()
        return made[()] if is_scalar else made

    def _named(self, name: str, written: list[Any]) -> Any:
        kind, items = self._classes[name], self.all(written)
        if not issubclass(kind, tuple) or len(items) != len(kind._fields):  # type: ignore[attr-defined]
            raise ValueError(f"{name} is no tuple of {len(items)}")
        return tuple.__new__(kind, items)

    def _object(self, name: str, written: list[Any]) -> Any:
        kind, own = self._classes[name], self.pairs(written)
        made: Any = object.__new__(kind)
        if issubclass(kind, nn.Module) or not all(is_own_name(made, key) for key in own):
            raise ValueError(f"{name} has no such attributes")
        Names(made, "").bind(own)
        return made


_MAKERS: dict[str, Callable[..., Any]] = {
    "int": lambda reader, digits: int(digits[:10_000], 16),
    "complex": lambda reader, real, imaginary: complex(real, imaginary),
    "bytes": lambda reader, value: value.numpy().tobytes(),
    "bytearray": lambda reader, value: bytearray(value.numpy().tobytes()),
    "array": lambda reader, typecode, value: array(typecode, value.numpy().tobytes()),
    "deque": lambda reader, written, maxlen: deque(reader.all(written), maxlen),
    "defaultdict": lambda reader, written, factory: defaultdict(_FACTORIES[factory], reader.pairs(written)),
    "tensor": Reader._tensor,
    "sparse": lambda reader, value, away: reader._tensor(value, away).to_sparse(),
    "ndarray": Reader._ndarray,
    "named": Reader._named,
    "object": Reader._object,
}
