# SPDX-License-Identifier: Apache-2.0
"""Values of a module written with tensors, numbers, strings and lists alone, and made of these again.

A value is a number, a string or ``None`` itself, or the place of an earlier node, or the path of an object that both
sides have. Nothing is unpickled, and no class is imported.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
"""Of tensors in messages."""
_PLAIN = (type(None), bool, float, str)
_ITEMS: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size)}
_PAIRS: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_NUMBERS = "biufc"  # kinds of numpy's dtypes
_AWAY = "_lives_on_device"


class UnwritableError(Exception):
    """A value cannot be written; says why."""


class Limits(NamedTuple):
    """What may be written in all, and how long a string may be."""

    entries: float = inf
    nbytes: float = inf
    characters: float = inf


NO_LIMITS = Limits()


class Writer:
    """Writes values into ``nodes``; ``gathered`` counts those in tensors, arrays and containers.

    ``paths`` are of objects that the reader has, too, by identity.
    """

    def __init__(self, paths: Mapping[int, str], limits: Limits = NO_LIMITS) -> None:
        self._paths, self._limits = paths, limits
        self.nodes: list[list[Any]] = []
        self._written: list[Any] = []
        self._at: dict[int, int] = {}
        self.entries = self.nbytes = self.gathered = 0

    def tried(self, values: Iterable[Any]) -> list[Any]:
        """Writes values, all or none of them; raises UnwritableError if one of them cannot be written."""
        number, before = len(self.nodes), (self.entries, self.nbytes, self.gathered)
        try:
            return [self._of(value) for value in values]
        except (UnwritableError, RecursionError) as error:
            for value in self._written[number:]:
                del self._at[id(value)]
            del self.nodes[number:], self._written[number:]
            self.entries, self.nbytes, self.gathered = before
            holds = "an object that holds itself, or lies too deep"
            raise UnwritableError(holds if isinstance(error, RecursionError) else str(error)) from None

    def _of(self, value: Any) -> Any:
        self._count(1, 0)
        if type(value) is str and len(value) > self._limits.characters:
            raise UnwritableError(f"a string of {len(value)} characters")
        if type(value) in _PLAIN or (type(value) is int and -(2**63) <= value < 2**63):
            return value
        if id(value) in self._paths:
            return {"known": self._paths[id(value)]}
        if id(value) not in self._at:
            node = self._node(value)
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
        kind, name = type(value), type(value).__name__
        if kind is Tensor and value.dtype in DTYPES and value.layout == torch.strided and not value.is_meta:
            return self._tensor(value)
        if kind is int:  # as states of generators
            return ["int", hex(value)]
        if kind is np.ndarray or (isinstance(value, np.generic) and value.dtype.kind in _NUMBERS):
            return self._array(value)
        if kind in _ITEMS.values():
            return [name, self._all(value)]
        if kind is deque:
            return [name, self._all(value), value.maxlen]
        if kind in _PAIRS.values():
            self.gathered -= len(value)
            return [name, self._all([part for pair in value.items() for part in pair])]
        raise UnwritableError(f"a {value.type()}" if kind is Tensor else f"a {name}")

    def _all(self, values: Any) -> list[Any]:
        self.gathered += len(values)
        return [self._of(value) for value in values]

    def _tensor(self, value: Tensor) -> list[Any]:
        away, leaf = value.device.type != "cpu" or hasattr(value, _AWAY), value.is_leaf and value.requires_grad
        self._count(0, value.nbytes)
        self.gathered += value.numel() if value.dim() else 0
        return ["tensor", value.detach().clone(memory_format=torch.contiguous_format), away, leaf]

    def _array(self, value: Any) -> list[Any]:
        if value.dtype.kind not in _NUMBERS:
            raise UnwritableError(f"an array of {value.dtype}")
        self._count(0, value.nbytes)
        self.gathered += value.size if value.ndim else 0
        content = torch.tensor(bytearray(value.tobytes()), dtype=torch.uint8)
        return ["ndarray", content, value.dtype.str, list(value.shape), isinstance(value, np.generic)]


class Reader:
    """Makes values of what a :class:`Writer` has written; anything may be raised where it was somebody else.

    ``by_path`` has the objects of this side. ``device`` is for tensors that were not in the writer's own memory.
    """

    def __init__(self, nodes: Sequence[Any], by_path: Mapping[str, Any], device: torch.device) -> None:
        self._by_path, self._device = by_path, device
        self._made: list[Any] = []
        for kind, content, *more in nodes:
            self._made.append(self._value(kind, content, *more))

    def all(self, written: Sequence[Any]) -> list[Any]:
        """Values."""
        return [self._of(value) for value in written]

    def pairs(self, written: Sequence[Any]) -> dict[Any, Any]:
        """Keys and values, one after the other."""
        values = iter(self.all(written))
        return dict(zip(values, values, strict=True))

    def _of(self, written: Any) -> Any:
        if not isinstance(written, Mapping):
            return written
        ((kind, place),) = written.items()
        if kind == "known":
            return self._by_path[place]
        if kind != "node" or not 0 <= place < len(self._made):  # only what is made already: nothing holds itself
            raise ValueError(f"nodes hold earlier ones, found {kind} {place}")
        return self._made[place]

    def _value(self, kind: str, content: Any, *more: Any) -> Any:
        if kind in _ITEMS:
            return _ITEMS[kind](self.all(content))
        if kind in _PAIRS:
            return _PAIRS[kind](self.pairs(content))
        if kind == "deque":
            return deque(self.all(content), *more)
        if kind == "int":
            return int(content[:10_000], 16)
        if kind == "tensor":
            return self._tensor(content, *more)
        if kind == "ndarray":
            return self._array(content, *more)
        raise ValueError(f"there are no values of kind {kind}")

    def _tensor(self, value: Tensor, away: bool, leaf: bool) -> Tensor:
        made = value.detach().clone().to(self._device if away else "cpu")
        if away:
            setattr(made, _AWAY, True)  # a server on the CPU passes it on to clients on GPUs
        return made.requires_grad_(leaf)

    def _array(self, value: Tensor, dtype: str, shape: list[int], is_scalar: bool) -> Any:
        if np.dtype(dtype).kind not in _NUMBERS:
            raise ValueError(f"arrays hold numbers, found {dtype}")
        made = np.frombuffer(value.numpy().tobytes(), dtype).reshape(shape).copy()
        return made[()] if is_scalar else made
