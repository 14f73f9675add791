# SPDX-License-Identifier: Apache-2.0
"""Deep copies of what a module keeps beside its parameters, which stand in for the originals as often as needed.

People gather in metrics, lists, numbers, dictionaries, arrays, buffers and objects of their own. A copy of all of it
lets a step or a hook of the module run once more without a trace, and shows what a run has changed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from fl_lightning.core.fingerprint import Fingerprint
from fl_lightning.core.lightning.metric_state import is_mergeable
from fl_lightning.core.lightning.names import Callback, LightningDataModule, Logger, Trainer
from fl_lightning.core.module_state import plain_attributes
from fl_lightning.core.modules import outside_metrics, submodules

_SHARED = (
    Trainer, Callback, LightningDataModule, Logger, Optimizer, Dataset, DataLoader, nn.Parameter, ModuleType,
    FunctionType, type,
)  # fmt: skip
"""Never copied: what a module refers to, and nothing that a step gathers in."""
_HEAVY = 2**17  # bytes of one attribute without its tensors: vocabularies, tokenizers, lists of files
_LARGE = 2**28  # bytes of one tensor's memory


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


class StateCopy:
    """A copy of plain attributes, buffers and metrics of a module and its submodules.

    Parameters, submodules, the trainer, callbacks and datasets are shared with the original. So are attributes that
    cannot be copied (open files, locks) or are too large; of these a change is noticed and cannot be undone.

    Args:
        module: the module.
        metrics: also those of its metrics whose states could be put aside and joined.
        tensor_limit: bytes; larger tensors are shared.
        known: names and ids of attributes that an earlier copy could not take; grows.

    Attributes:
        shared: names of attributes that are shared for that reason.
    """

    def __init__(
        self,
        module: nn.Module,
        metrics: bool = True,
        tensor_limit: int = _LARGE,
        known: set[tuple[str, int]] | None = None,
    ) -> None:
        self._known = set() if known is None else known
        self._parts = outside_metrics(submodules(module))
        slots = _slots(self._parts, metrics)
        while True:
            self._slots = [slot for slot in slots if (slot.name, id(slot.value)) not in self._known]
            taken = {id(slot) for slot in self._slots}
            left = [slot for slot in slots if id(slot) not in taken]
            if self._write(tensor_limit):
                break
        self.shared = tuple(slot.name for slot in left)
        self._watched = Fingerprint()
        for slot in left:
            self._watched.add(slot.name, slot.value)

    def _write(self, tensor_limit: int) -> bool:
        """Writes all slots one after the other; ``False``, and one more is known, if one cannot be written."""
        file = io.BytesIO()
        self._writer = writer = _Writer(file, {id(part) for _, part in self._parts}, tensor_limit)
        self._ends: list[tuple[int, int]] = []  # in the file and in the writer's table
        for slot in self._slots:
            start = file.tell()
            try:
                writer.dump(slot.value)
                fits = slot.is_theirs or file.tell() - start <= _HEAVY
            except Exception:  # __getstate__ of anybody may raise anything
                fits = False
            if not fits:
                self._known.add((slot.name, id(slot.value)))
                return False
            self._ends.append((file.tell(), len(writer.given)))
        self._bytes = file.getvalue()
        return True

    @contextmanager
    def in_place(self, names: Container[str] | None = None) -> Iterator[None]:
        """Puts a fresh copy in the places of the originals; they come back untouched, and what was new goes.

        Args:
            names: which of them; default all.
        """
        reader = _Reader(io.BytesIO(self._bytes), self._writer)
        places = [(values, dict(values)) for values in _places(self._parts)]
        copies = [reader.load() for _ in self._slots]
        try:
            for slot, value in zip(self._slots, copies, strict=True):
                if names is None or slot.name in names:
                    slot.owner[slot.key] = value
            yield
        finally:
            for values, before in places:
                values.clear()
                values.update(before)

    def changes(self, later: StateCopy) -> list[str]:
        """Names whose contents differ, those of metrics apart."""
        names = self._watched.changes(later._watched)
        mine, others = self._segments(), later._segments()
        for name in {**mine, **others}:
            one, other = mine.get(name), others.get(name)
            if one is None or other is None or one[0] != other[0] or not self._same(later, one[1], other[1]):
                names.append(name)
        return sorted(set(names))

    def _segments(self) -> dict[str, tuple[bytes, range]]:
        found, start, first = {}, 0, 0
        for slot, (end, last) in zip(self._slots, self._ends, strict=True):
            if not slot.is_theirs:
                found[slot.name] = self._bytes[start:end], range(first, last)
            start, first = end, last
        return found

    def _same(self, later: StateCopy, mine: range, others: range) -> bool:
        if len(mine) != len(others):
            return False
        return all(self._writer.same(later._writer, i, j) for i, j in zip(mine, others, strict=True))


@dataclass(frozen=True, eq=False)
class _Slot:
    name: str
    owner: dict[str, Any]
    key: str
    value: Any
    is_theirs: bool
    """torchmetrics keeps it, as a metric or in a collection of metrics."""


def _slots(parts: list[tuple[str, nn.Module]], with_metrics: bool) -> list[_Slot]:
    """All places of a copy; torchmetrics' own come last, because what comes first decides how the rest is written."""
    own: list[_Slot] = []
    theirs: list[_Slot] = []
    for prefix, part in parts:
        at = f"{prefix}." if prefix else ""
        collection = isinstance(part, MetricCollection)
        attributes = plain_attributes(part).items()
        if with_metrics or not collection:
            (theirs if collection else own).extend(_Slot(at + k, vars(part), k, v, collection) for k, v in attributes)
        own += [_Slot(at + k, part._buffers, k, v, False) for k, v in part._buffers.items() if v is not None]
        children: dict[str, Any] = part._modules
        for key, child in children.items():
            if isinstance(child, Metric) and is_mergeable(child):
                own += _beside_states(at + key, child)
                if not with_metrics:
                    continue
            if isinstance(child, Metric):
                theirs.append(_Slot(at + key, children, key, child, True))
    return [*own, *theirs]


def _beside_states(name: str, metric: Metric) -> list[_Slot]:
    """What a metric keeps in plain attributes: no reset empties it, and no rule joins it."""
    return [
        _Slot(f"{name}.{key}", vars(metric), key, value, False)
        for key, value in vars(metric).items()
        if key not in metric._defaults and key not in _METRIC
    ]


class _Empty(Metric):
    def update(self) -> None:
        """Nothing."""

    def compute(self) -> None:
        """Nothing."""


_METRIC = frozenset(vars(_Empty()))


def _places(parts: list[tuple[str, nn.Module]]) -> Iterator[dict[str, Any]]:
    for _, part in parts:
        yield from (vars(part), part._buffers, part._modules)


class _Writer(pickle.Pickler):
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

    def _watched(self, value: Tensor) -> Tensor:
        self._versions[len(self.given)] = None if value.is_inference() else value._version
        return value

    def same(self, later: _Writer, mine: int, others: int) -> bool:
        """Whether two entries of the tables are the same object, or tensors with the same bytes."""
        one, other = self.given[mine], later.given[others]
        if isinstance(one, _View) and isinstance(other, _View):
            a, b = self.memories[one.memory], later.memories[other.memory]
            alike = (one.dtype, one.offset, one.size, one.stride) == (
                other.dtype,
                other.offset,
                other.size,
                other.stride,
            )
            return alike and a.device == b.device and torch.equal(a, b)
        return one is other and self._versions.get(mine) == later._versions.get(others)


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, writer: _Writer) -> None:
        super().__init__(file)
        self._writer = writer
        self._memories = [memory.clone() for memory in writer.memories]

    def find_class(self, module: str, name: str) -> Any:
        """The table's entries; all other classes and functions are in the table themselves."""
        return self._of_table if (module, name) == (__name__, _given.__name__) else super().find_class(module, name)

    def _of_table(self, place: int) -> Any:
        value = self._writer.given[place]
        return value.of(self._memories) if isinstance(value, _View) else value


def _given(place: int) -> Any:
    """Stands for an entry of the table in what the writer writes."""
    raise RuntimeError(f"entry {place} of a state copy must be read by its own reader")


def _raw(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
