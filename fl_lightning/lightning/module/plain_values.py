# SPDX-License-Identifier: Apache-2.0
"""Values of a module written with tensors, numbers, strings and lists alone, and made of these again.

A value is a number, a string or ``None`` itself, or the place of an earlier node, or the path of an object that both
sides have. Nothing is unpickled, and no class is imported: objects are of classes that the reader's module has already.
"""

from __future__ import annotations

import enum
import re
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.lightning.module.kinds import kinds_of
from fl_lightning.lightning.module.objects import ATTRIBUTES, FRAMEWORK, Bound, attributes_of, bind
from fl_lightning.lightning.module.shared import Shared

_PLAIN = (type(None), bool, float, str)
_LISTS: dict[str, Callable[..., Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size,
}  # fmt: skip
_MAPPINGS: dict[str, Callable[..., Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
"""Of tensors in messages."""
_NUMBERS = re.compile(r"[<>|=]?[biufc]\d{1,2}")
_AWAY = "_lives_on_device"


class UnwritableError(Exception):
    """A value cannot be written; says why."""


class Limits(NamedTuple):
    """What may be written in all, and how long a string may be."""

    entries: float = inf
    nbytes: float = inf
    characters: float = inf


NO_LIMITS = Limits()


def _is_reserved(module: nn.Module, name: str) -> bool:
    return any(name in part for part in (FRAMEWORK, module._parameters, module._buffers, module._modules))


def is_own_name(owner: object, name: object) -> bool:
    """Whether somebody else may bind this attribute: it hides nothing of the class's code, and no part of a module."""
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("__") or len(name) > 200:
        return False
    if isinstance(owner, nn.Module) and _is_reserved(owner, name):
        return name == "training"
    found = getattr(type(owner), name, None)
    return not callable(found) and (not hasattr(found, "__get__") or type(found).__name__ == "member_descriptor")


def _is_simple(value: object) -> bool:
    of_torch = isinstance(value, nn.Module) or type(value).__module__.partition(".")[0] == "torch"
    return not of_torch and kinds_of(value) == (ATTRIBUTES,)


class Writer:
    """Writes values into ``nodes``; ``gathered`` counts those in tensors, arrays and containers.

    ``has`` says whether the reader has the object of a path.
    """

    def __init__(self, shared: Shared, limits: Limits = NO_LIMITS, has: Callable[[str], bool] = bool) -> None:
        self._shared, self._limits, self._has = shared, limits, has
        self.nodes: list[list[Any]] = []
        self._written: list[Any] = []
        self._at: dict[int, int] = {}
        self._open: set[int] = set()
        self.entries = self.nbytes = self.gathered = 0

    def tried(self, values: Iterable[Any]) -> list[Any]:
        """Writes values, all or none of them; raises UnwritableError if one of them cannot be written."""
        before, entries, nbytes = len(self.nodes), self.entries, self.nbytes
        try:
            return [self.of(value) for value in values]
        except (UnwritableError, RecursionError) as error:
            for value in self._written[before:]:
                self._at.pop(id(value), None)
            del self.nodes[before:], self._written[before:]
            self.entries, self.nbytes = entries, nbytes
            self._open.clear()
            raise UnwritableError(str(error) or type(error).__name__) from None

    def of(self, value: Any) -> Any:
        """A value; raises UnwritableError if it cannot be written."""
        self._count(1, 0)
        if type(value) is str and len(value) > self._limits.characters:
            raise UnwritableError(f"a string of {len(value)} characters")
        if type(value) in _PLAIN or (type(value) is int and -(2**63) <= value < 2**63):
            return value
        if id(value) in self._shared.paths and self._has(path := self._shared.paths[id(value)]):
            return {"known": path}
        if id(value) not in self._at:
            if id(value) in self._open:
                raise UnwritableError("an object that holds itself")
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
        most = self._limits
        if self.entries > most.entries or self.nbytes > most.nbytes:
            raise UnwritableError(f"more than {most.entries} entries or {most.nbytes / 2**20:.0f} MiB in all")

    def _node(self, value: Any) -> list[Any]:
        kind = type(value)
        name = kind.__name__
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is int:
            return ["int", hex(value)]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind in (torch.dtype, torch.device):
            return [name, str(value).removeprefix("torch.")]
        if kind in (bytes, bytearray):
            return [name, self._bytes(value)]
        if kind is array:
            return ["array", value.typecode, self._bytes(value.tobytes())]
        if isinstance(value, (np.ndarray, np.generic)):
            if value.dtype.kind not in "biufc" or kind.__module__ != "numpy":
                raise UnwritableError(f"an array of {value.dtype}")
            self.gathered += value.size if value.ndim else 0
            return ["ndarray", value.dtype.str, list(value.shape), self._bytes(value.tobytes()), name != "ndarray"]
        if isinstance(value, enum.Enum) and self._shared.classes.get(kind.__qualname__) is kind:
            return ["enum", kind.__qualname__, value.name]
        if kind is torch.Size:
            return [name, list(value)]
        if kind in _LISTS.values():
            return [name, self._all(value)]
        if kind is deque:
            return [name, self._all(value), value.maxlen]
        if kind in _MAPPINGS.values():
            return [name, self._pairs(value)]
        if kind is defaultdict:
            factory = getattr(value.default_factory, "__qualname__", None)
            known = self._shared.factories.get(factory)
            if getattr(known, "__code__", known) is getattr(value.default_factory, "__code__", value.default_factory):
                return [name, self._pairs(value), factory]
        return self._object(value)

    def _object(self, value: Any) -> list[Any]:
        kind, name = type(value), type(value).__qualname__
        if self._shared.classes.get(name) is kind and isinstance(value, tuple):
            return ["named", name, self._all(value)]
        if self._shared.classes.get(name) is kind and _is_simple(value):
            own = {key: part for key, part in attributes_of(value).items() if is_own_name(value, key)}
            return ["object", name, self._pairs(own)]
        raise UnwritableError(f"a {kind.__name__}")

    def _all(self, values: Any) -> list[Any]:
        self.gathered += len(values)
        return [self.of(value) for value in values]

    def _pairs(self, values: Mapping[Any, Any]) -> list[Any]:
        self.gathered -= len(values)
        return self._all([part for pair in values.items() for part in pair])

    def _tensor(self, value: Tensor) -> list[Any]:
        if value.dtype not in DTYPES or value.is_quantized or value.is_meta or type(value) is not Tensor:
            raise UnwritableError(f"a {type(value).__name__} of {value.dtype}")
        away = value.device.type != "cpu" or hasattr(value, _AWAY)
        sparse = value.layout != torch.strided
        plain = value.detach().to_dense() if sparse else value.detach()
        self._count(0, plain.nbytes)
        self.gathered += plain.numel() if plain.dim() else 0
        leaf = value.is_leaf and value.requires_grad
        return ["sparse" if sparse else "tensor", plain.clone(memory_format=torch.contiguous_format), away, leaf]

    def _bytes(self, value: bytes | bytearray) -> Tensor:
        self._count(0, len(value))
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)


class Reader:
    """Makes values of what a :class:`Writer` has written; anything may be raised where it was somebody else.

    ``device`` is for tensors that were not in the writer's own memory.
    """

    def __init__(self, nodes: Sequence[Any], shared: Shared, device: torch.device) -> None:
        self._shared, self._device = shared, device
        self._made: list[Any] = []
        for kind, *parts in nodes:
            self._made.append(self._value(kind, *parts))

    def of(self, written: Any) -> Any:
        """A value."""
        if not isinstance(written, Mapping):
            return written
        ((kind, place),) = written.items()
        if kind == "known":
            return self._shared.by_path[place]
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

    def _tensor(self, value: Tensor, away: bool, leaf: bool) -> Tensor:
        made = value.detach().clone().to(self._device if away else "cpu")
        if away:
            setattr(made, _AWAY, True)  # a server on the CPU passes it on to clients on GPUs
        return made.requires_grad_(leaf)

    def _ndarray(self, dtype: str, shape: list[int], value: Tensor, is_scalar: bool) -> Any:
        if not _NUMBERS.fullmatch(dtype):
            raise ValueError(f"arrays hold numbers, found {dtype}")
        made = np.frombuffer(value.numpy().tobytes(), dtype).reshape(shape).copy()
        return made[()] if is_scalar else made

    def _named(self, name: str, written: list[Any]) -> Any:
        kind, items = self._shared.classes[name], self.all(written)
        if not issubclass(kind, tuple) or len(items) != len(kind._fields):  # type: ignore[attr-defined]
            raise ValueError(f"{name} is no tuple of {len(items)}")
        return tuple.__new__(kind, items)

    def _enum(self, name: str, member: str) -> Any:
        kind = self._shared.classes[name]
        if not issubclass(kind, enum.Enum):
            raise ValueError(f"{name} has no {member}")
        return kind[member]

    def _object(self, name: str, written: list[Any]) -> Any:
        kind, own = self._shared.classes[name], self.pairs(written)
        made: Any = object.__new__(kind)
        if not _is_simple(made) or not all(is_own_name(made, key) for key in own):
            raise ValueError(f"{name} has no such attributes")
        bind(made, Bound(own, []))
        return made


_MAKERS: dict[str, Callable[..., Any]] = {
    "int": lambda reader, digits: int(digits[:10_000], 16),
    "complex": lambda reader, real, imaginary: complex(real, imaginary),
    "dtype": lambda reader, name: {str(dtype): dtype for dtype in DTYPES}[f"torch.{name}"],
    "device": lambda reader, name: torch.device(name),
    "bytes": lambda reader, value: value.numpy().tobytes(),
    "bytearray": lambda reader, value: bytearray(value.numpy().tobytes()),
    "array": lambda reader, typecode, value: array(typecode, value.numpy().tobytes()),
    "deque": lambda reader, written, maxlen: deque(reader.all(written), maxlen),
    "defaultdict": lambda reader, written, factory: defaultdict(
        reader._shared.factories[factory], reader.pairs(written)
    ),
    "tensor": Reader._tensor,
    "sparse": lambda reader, value, away, leaf: reader._tensor(value, away, leaf).to_sparse(),
    "ndarray": Reader._ndarray,
    "named": Reader._named,
    "enum": Reader._enum,
    "object": Reader._object,
}
