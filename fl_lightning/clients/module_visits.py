# SPDX-License-Identifier: Apache-2.0
"""What a visit sees of the module beside parameters and buffers, and what becomes of what it leaves there.

Every visit of a round begins with the attributes as the round found them and with empty metrics. What it leaves is
joined after the round, in the order of the cohort.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.core.errors import ModuleError
from fl_lightning.core.processes import pack, unpack
from fl_lightning.core.tensors import memory_of
from fl_lightning.lightning.metric_state import MetricShare, MetricState, held_in, joins_clients
from fl_lightning.lightning.module.contents import PLAIN
from fl_lightning.lightning.module.kept_objects import Added, Items, Kept, Names, Numbers, kinds_of
from fl_lightning.lightning.module.object_state import ObjectState


@dataclass(frozen=True)
class Left:
    """What one visit leaves in the module."""

    changes: list[tuple[Kept, Any]] = field(default_factory=list)  # objects, and how they have changed
    metrics: list[tuple[Metric, MetricShare]] = field(default_factory=list)  # what it has added to them
    ran_on: tuple[str, ...] = ()  # names of metrics that it has updated and that nothing can join


class ModuleVisits:
    """Lets every visit begin with the module as the round found it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._state: ObjectState | None = None
        self._aside: list[tuple[Metric, MetricState]] = []
        self._others: list[tuple[str, Metric, list[Any]]] = []
        self._in_visit = self._pinned = False
        self._changed: list[Kept] | None = None

    def look(self) -> ObjectState:
        """Takes the module as it is now for what visits begin with, unless that is what they begin with already."""
        self._state = ObjectState(self._module) if self._state is None else self._state.current()
        return self._state

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Every visit begins with the module as it is now; nobody else changes it meanwhile."""
        self.look()
        self._pinned = True
        try:
            yield
        finally:
            self._pinned = False

    @property
    def looked(self) -> ObjectState:
        """The module as it was when it was last looked at."""
        assert self._state is not None
        return self._state

    def in_turn(self) -> list[str]:
        """What runs on from client to client, as a sentence each: metrics that nothing can join, iterators, files."""
        alone, found = self.look().alone, self.looked.metrics
        metrics = [(name, type(metric).__name__) for name, metric in found.items() if not joins_clients(metric)]
        return [
            *(f"what clients add to metric {name!r} ({kind}) cannot be joined" for name, kind in metrics),
            *(f"attribute {name!r} ({kind}) cannot be put back after a client" for name, kind in alone.items()),
        ]

    def changed(self) -> list[str]:
        """Attributes that hold something else than when they were last looked at."""
        return sorted({name for kept in self.looked.changed() for name in kept.changed_names()})

    # ---- a visit

    def begin(self) -> None:
        """A client is about to train."""
        if not self._pinned:
            self.look()
        metrics = self.looked.metrics.items()
        self._in_visit, self._changed = True, None
        self._aside = [(metric, MetricState(metric)) for _, metric in metrics if joins_clients(metric)]
        self._others = [(name, metric, held_in(metric)) for name, metric in metrics if not joins_clients(metric)]
        for _, before in self._aside:  # of all, before the first is emptied: those of a collection may share states
            before.metric.reset()

    def end(self) -> Left:
        """What the visit leaves; :meth:`put_back` has to follow."""
        shares = [(metric, MetricShare.of(metric)) for metric, _ in self._aside]
        metrics = [(metric, share) for metric, share in shares if share.updates or share.value is not None]
        changed = self._changed = self.looked.changed()
        ran_on = tuple(name for name, metric, held in self._others if not _same(held_in(metric), held))
        if not changed:
            return Left([], metrics, ran_on)
        settled = _Settled(self.looked)
        return Left([(kept, settled.of(kept.change())) for kept in changed], metrics, ran_on)

    def put_back(self) -> None:
        """Ends a visit, however it went: the module is as it was before."""
        if not self._in_visit:
            return
        for kept in self.looked.changed() if self._changed is None else self._changed:
            kept.put(kept.content)
        for _, before in self._aside:
            before.put_back()
        self._in_visit, self._aside = False, []

    # ---- copies in other processes

    def packed(self, left: Left) -> bytes:
        """What a visit to a copy of the module has left, for the module itself."""
        if left.ran_on:
            raise ModuleError(
                f"metrics that clients update must be such that clients can be joined where these train in other "
                f"processes, found {left.ran_on[0]!r}: use one process and executor=Sequential()"
            )
        if not left.changes and not left.metrics:
            return b""
        places = {id(value): place for place, value in enumerate(self.looked.known)}
        try:
            return pack((left.changes, left.metrics), places)
        except Exception as error:  # __reduce__ of anybody may raise anything
            names = ", ".join(sorted({name for kept, _ in left.changes for name in kept.changed_names()}))
            raise ModuleError(
                f"what {type(self._module).__name__} leaves in attributes must be something that can be pickled where "
                f"clients train in other processes, found {error} (changed: {names}): use executor=Sequential()"
            ) from None

    def unpacked(self, packed: bytes) -> Left:
        """What :meth:`packed` gave in a copy."""
        return Left(*unpack(packed, torch.device("cpu"), self.looked.known)) if packed else Left()

    # ---- the round

    def merge(self, visits: Sequence[Left], chosen: Left | None) -> None:
        """Joins what visits have left, in cohort order; attributes are those of the visit ``chosen``, if any."""
        by_object: dict[tuple[int, type[Kept]], list[tuple[Kept, Any, bool]]] = {}
        for left in visits:
            for kept, change in left.changes:
                by_object.setdefault((id(kept.value), type(kept)), []).append((kept, change, left is chosen))
            for metric, share in left.metrics:
                share.add_to(metric)
        for changes in by_object.values():
            _merge_object(changes)


def _merge_object(changes: Sequence[tuple[Kept, Any, bool]]) -> None:
    if all(isinstance(change, Added) for _, change, _ in changes):
        for kept, change, _ in changes:
            kept.apply(change)
        return
    new: dict[Any, Any] = {}
    for kept, change, _ in changes:
        for key, items in kept.new_lists(change).items():
            new.setdefault(key, type(items)()).extend(items)
    for kept, change, is_chosen in changes:
        if is_chosen:
            kept.apply(change)
    changes[0][0].bind(new)


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


class _Settled:
    """What is new in a visit, fit to outlast it: tensors without graphs, in memory of their own."""

    def __init__(self, state: ObjectState) -> None:
        self._known = set(map(id, state.known))
        tensors = [v for v in state.own if isinstance(v, Tensor)]
        tensors += [kept.value for kept in state.kept if isinstance(kept, Numbers)]
        self._memories = {memory for memory in map(memory_of, tensors) if memory is not None}
        self._done: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """The value itself where nothing is to be done."""
        if isinstance(value, PLAIN) or id(value) in self._known:
            return value
        if id(value) not in self._done:
            self._done[id(value)] = value, value  # it may hold itself
            self._done[id(value)] = value, self._made(value)
        return self._done[id(value)][1]

    def _made(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if all(map(is_, items, value)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        for kind in kinds_of(value) or ():
            if kind is Items and not isinstance(value, set):
                for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                    if (settled := self.of(item)) is not item:
                        value[key] = settled
            elif kind is Names:
                kept = Names(value, "")
                changed = {name: self.of(item) for name, item in kept.content.items()}
                kept.bind({name: item for name, item in changed.items() if item is not kept.content[name]})
        return value

    def _tensor(self, value: Tensor) -> Tensor:
        plain = value.detach() if value.grad_fn is not None else value
        memory = memory_of(value)
        if memory is not None and (memory in self._memories or value.untyped_storage().nbytes() != value.nbytes):
            return plain.detach().clone()
        return plain
