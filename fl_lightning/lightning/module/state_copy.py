# SPDX-License-Identifier: Apache-2.0
"""Deep copies of what a module keeps beside its parameters, which stand in for the originals as often as needed.

People gather in metrics, lists, numbers, dictionaries, arrays, buffers and objects of their own. A copy of all of it
lets a step or a hook of the module run once more without a trace, and shows what a run has changed.
"""

from __future__ import annotations

import io
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.core.modules import outside_metrics, submodules
from fl_lightning.lightning.metric_state import beside_states, is_mergeable
from fl_lightning.lightning.module.fingerprint import Fingerprint
from fl_lightning.lightning.module.graph_copy import GraphReader, GraphWriter
from fl_lightning.lightning.module.module_state import plain_attributes

_LARGE = 2**26, 2**28
"""Bytes of one attribute without its tensors and arrays, and of one tensor or array, up to which they are copied."""
_SMALL = 2**17, 2**20


class StateCopy:
    """A copy of plain attributes, buffers and metrics of a module and its submodules.

    Parameters, submodules, the trainer, callbacks and datasets are shared with the original. So are attributes that
    cannot be copied (open files, locks) or are too large; of these a change is noticed and cannot be undone.

    Args:
        module: the module.
        metrics: also those of its metrics whose states could be put aside and joined.
        small: share all that is not small as well, for copies that are made often and of what should not change.
        known: names and ids of attributes that an earlier copy could not take; grows.

    Attributes:
        shared: names of attributes that are shared for that reason.
    """

    def __init__(
        self,
        module: nn.Module,
        metrics: bool = True,
        small: bool = False,
        known: set[tuple[str, int]] | None = None,
    ) -> None:
        self._known = set() if known is None else known
        self._parts = outside_metrics(submodules(module))
        slots = _slots(self._parts, metrics)
        while True:
            self._slots = [slot for slot in slots if (slot.name, id(slot.value)) not in self._known]
            taken = {id(slot) for slot in self._slots}
            left = [slot for slot in slots if id(slot) not in taken]
            if self._write(*(_SMALL if small else _LARGE)):
                break
        self.shared = tuple(slot.name for slot in left)
        self._watched = Fingerprint(part for _, part in self._parts)
        for slot in left:
            self._watched.add(slot.name, slot.value)

    def _write(self, attribute_limit: int, tensor_limit: int) -> bool:
        """Writes all slots one after the other; ``False``, and one more is known, if one cannot be written."""
        file = io.BytesIO()
        self._writer = writer = GraphWriter(file, {id(part) for _, part in self._parts}, tensor_limit)
        self._ends: list[tuple[int, int]] = []  # in the file and in the writer's table
        for slot in self._slots:
            start = file.tell()
            try:
                writer.dump(slot.value)
                fits = slot.is_theirs or file.tell() - start <= attribute_limit
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
        reader = GraphReader(io.BytesIO(self._bytes), self._writer)
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
        mine, others = self._segments(), later._segments()
        names = [name for name in {**mine, **others} if not self._same(later, mine.get(name), others.get(name))]
        if len(names) > 1:
            # What is written refers to what was written before it: one change may look like several.
            one, other = self._loaded(), later._loaded()
            names = [name for name in names if not self._alike(name, one, other, mine)]
        return sorted({*names, *self._watched.changes(later._watched)})

    def _segments(self) -> dict[str, tuple[bytes, range]]:
        found, start, first = {}, 0, 0
        for slot, (end, last) in zip(self._slots, self._ends, strict=True):
            if not slot.is_theirs:
                found[slot.name] = self._bytes[start:end], range(first, last)
            start, first = end, last
        return found

    def _same(self, later: StateCopy, mine: tuple[bytes, range] | None, others: tuple[bytes, range] | None) -> bool:
        if mine is None or others is None or mine[0] != others[0] or len(mine[1]) != len(others[1]):
            return False
        return all(self._writer.same(later._writer, i, j) for i, j in zip(mine[1], others[1], strict=True))

    def _loaded(self) -> dict[str, Any]:
        reader = GraphReader(io.BytesIO(self._bytes), self._writer)
        return {slot.name: reader.load() for slot in self._slots}

    def _alike(self, name: str, one: dict[str, Any], other: dict[str, Any], mine: dict[str, Any]) -> bool:
        """Whether two loaded values are the same when each is written on its own."""
        if name not in one or name not in other or self._writer.watches(mine[name][1]):
            return False
        parts, files = {id(part) for _, part in self._parts}, (io.BytesIO(), io.BytesIO())
        writers = [GraphWriter(file, parts, _LARGE[1]) for file in files]
        for writer, value in zip(writers, (one[name], other[name]), strict=True):
            writer.dump(value)
        if files[0].getvalue() != files[1].getvalue():
            return False
        return all(writers[0].same(writers[1], i, i) for i in range(len(writers[0].given)))


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
    return [_Slot(f"{name}.{key}", vars(metric), key, value, False) for key, value in beside_states(metric).items()]


def _places(parts: list[tuple[str, nn.Module]]) -> Iterator[dict[str, Any]]:
    for _, part in parts:
        yield from (vars(part), part._buffers, part._modules)
