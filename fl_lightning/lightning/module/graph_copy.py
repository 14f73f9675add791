# SPDX-License-Identifier: Apache-2.0
"""Pickles objects within one process: what is shared goes into a table, and so do copies of tensors.

``copy.deepcopy`` asks every object for itself and cannot leave one out. A pickler asks about each object that it meets.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from fl_lightning.lightning.names import Callback, LightningDataModule, Logger, Trainer

_SHARED = (
    Trainer, Callback, LightningDataModule, Logger, Optimizer, Dataset, DataLoader, nn.Parameter, ModuleType,
    FunctionType, type,
)  # fmt: skip
"""Never copied: what a module refers to, and nothing that a step gathers in."""


@dataclass(frozen=True)
class _View:
    """A tensor over a copied memory: tensors that shared memory share it in the copy."""

    memory: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def of(self, memories: list[Tensor]) -> Tensor:
        memory = memories[self.memory]
        view = torch.empty(0, dtype=self.dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _ArrayView:
    """The same of an array of numpy."""

    memory: int
    dtype: np.dtype[Any]
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, memories: list[Tensor]) -> Any:
        return np.ndarray(self.size, self.dtype, memories[self.memory].numpy(), self.offset, self.stride)


class GraphWriter(pickle.Pickler):
    """Pickles within the process: what is shared goes into a table, and so do copies of tensors."""

    def __init__(self, file: io.BytesIO, parts: set[int], limit: int) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._parts, self._limit = parts, limit
        self.given: list[Any] = []
        self._versions: dict[int, Any] = {}
        self.memories: list[Tensor] = []
        self._places: dict[Any, int] = {}

    def reducer_override(self, value: Any) -> Any:
        """See :meth:`pickle.Pickler.reducer_override`."""
        if value is _given:
            return NotImplemented
        if type(value) is Tensor:
            return self._give(self._tensor(value))
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return self._give(self._array(value))
        if isinstance(value, _SHARED) or id(value) in self._parts:
            return self._give(value)
        if type(value) is BuiltinFunctionType and isinstance(value.__self__, (ModuleType, type(None))):
            return self._give(value)
        return NotImplemented

    def _give(self, value: Any) -> Any:
        self.given.append(value)
        return _given, (len(self.given) - 1,)

    def _tensor(self, value: Tensor) -> Any:
        copied = value.layout is torch.strided and not value.is_meta and not value.is_quantized
        if not copied or value.grad_fn is not None or value.requires_grad or value.is_conj() or value.is_neg():
            return self._watched(value)
        storage = value.untyped_storage()
        if storage.nbytes() > self._limit:
            return self._watched(value)
        place = (storage.data_ptr() or id(value), value.device)
        if place not in self._places:
            self._places[place] = len(self.memories)
            self.memories.append(_raw(storage, value.device).clone())
        return _View(self._places[place], value.dtype, int(value.storage_offset()), value.shape, value.stride())

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if not (owner.flags.c_contiguous or owner.flags.f_contiguous) or owner.nbytes > self._limit:
            raise ValueError(f"an array of {owner.nbytes} B is not copied")
        start = owner.__array_interface__["data"][0]
        place = ("numpy", start or id(value))
        if place not in self._places:
            self._places[place] = len(self.memories)
            self.memories.append(torch.from_numpy(np.frombuffer(bytearray(owner.tobytes("A")), dtype=np.uint8)))
        offset = value.__array_interface__["data"][0] - start
        return _ArrayView(self._places[place], value.dtype, offset, value.shape, value.strides)

    def _watched(self, value: Tensor) -> Tensor:
        self._versions[len(self.given)] = None if value.is_inference() else value._version
        return value

    def watches(self, places: range) -> bool:
        """Whether one of these entries is a tensor that is shared, of which a change shows in its version only."""
        return any(place in self._versions for place in places)

    def same(self, later: GraphWriter, mine: int, others: int) -> bool:
        """Whether two entries of the tables are the same object, or tensors with the same bytes."""
        one, other = self.given[mine], later.given[others]
        if isinstance(one, (_View, _ArrayView)) and type(one) is type(other):
            a, b = self.memories[one.memory], later.memories[other.memory]
            alike = (one.dtype, one.offset, one.size, one.stride) == (
                other.dtype,
                other.offset,
                other.size,
                other.stride,
            )
            return alike and a.device == b.device and torch.equal(a, b)
        return one is other and self._versions.get(mine) == later._versions.get(others)


class GraphReader(pickle.Unpickler):
    """Reads what a writer has written; every reader makes copies of its own."""

    def __init__(self, file: io.BytesIO, writer: GraphWriter) -> None:
        super().__init__(file)
        self._writer = writer
        self._memories = [memory.clone() for memory in writer.memories]

    def find_class(self, module: str, name: str) -> Any:
        """The table's entries; all other classes and functions are in the table themselves."""
        return self._of_table if (module, name) == (__name__, _given.__name__) else super().find_class(module, name)

    def _of_table(self, place: int) -> Any:
        value = self._writer.given[place]
        return value.of(self._memories) if isinstance(value, (_View, _ArrayView)) else value


def _given(place: int) -> Any:
    """Stands for an entry of the table in what the writer writes."""
    raise RuntimeError(f"entry {place} of a state copy must be read by its own reader")


def _raw(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
