# SPDX-License-Identifier: Apache-2.0
"""What follows from a rule's declarations: checkpoints, messages, memory, columns, and rounds that do not count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fl_lightning.core.model_snapshot import Snapshot
from fl_lightning.core.storage.declared import Declared, Extent
from fl_lightning.core.storage.per_client import ByClient, plain, restored
from fl_lightning.core.updates import Columns

Rule = TypeVar("Rule")


def declared(rule: object) -> dict[str, Declared[Any]]:
    """What the class of a rule and its base classes keep, by name."""
    found: dict[str, Declared[Any]] = {}
    for kind in reversed(type(rule).__mro__):
        found |= {name: entry for name, entry in vars(kind).items() if name in found or isinstance(entry, Declared)}
    return {name: entry for name, entry in found.items() if isinstance(entry, Declared)}


def state(rule: object, sent: Literal["all"] | None = None) -> dict[str, Any]:
    """What a checkpoint holds of a rule, or what of that is ``sent``, by name, but for ``None``; memory is shared."""
    entries = [(name, entry) for name, entry in declared(rule).items() if sent is None or entry.sent == sent]
    states = {name: entry.state(getattr(rule, name)) for name, entry in entries}
    return {name: value for name, value in states.items() if value is not None}


def reset(rule: object) -> None:
    """A rule forgets everything."""
    for name in declared(rule):
        vars(rule).pop(name, None)


def load(rule: object, states: Mapping[str, Any]) -> None:
    """Restores what :func:`state` returned; what it lacks begins anew."""
    entries = declared(rule)
    _only(rule, states, list(entries))
    loaded = {name: entries[name].loaded(rule, value) for name, value in states.items()}
    reset(rule)
    vars(rule).update(loaded)


def renumbered(rule: object, states: Mapping[str, Any], ids: Mapping[int, int]) -> dict[str, Any]:
    """What :func:`state` returned where clients have other ids now, by those that they had."""
    entries = declared(rule)
    return {name: entries[name].renumbered(value, ids) if name in entries else value for name, value in states.items()}


def among(rule: object, clients: int) -> None:
    """So many clients are registered, and a rule sees nothing of what others had, who may come back."""
    for name in declared(rule):
        value = getattr(rule, name)
        if isinstance(value, ByClient):
            value.among(clients)


def at(rule: Rule, states: Mapping[str, Any]) -> Rule:
    """Another rule, as this one was when :func:`state` returned these; this one stays as it is."""
    other = copy(rule)
    load(other, states)
    return other


def tentatively(*rules: object) -> Callable[[bool], None]:
    """Called before a round; what is returned is called with whether it counts. If not, rules become what they were."""
    settle = [entry.tentatively(rule) for rule in rules for entry in declared(rule).values()]

    def all_settle(happened: bool) -> None:
        for each in settle:
            each(happened)

    return all_settle


# ---- columns, places and bytes


def columns(rule: object) -> tuple[str, ...]:
    """Names of the entries of :func:`state` with a number per column, also those that are sent."""
    return tuple(column for entry in declared(rule).values() for column in entry.columns)


def placement(*rules: object) -> set[str]:
    """Attributes that say where things are kept, and change no result."""
    return {name for rule in rules for entry in declared(rule).values() for name in entry.placement}


def planned(rule: object, extent: Extent) -> dict[str, int]:
    """Bytes that a rule will hold at most, by name."""
    sizes = {name: entry.planned(rule, extent) for name, entry in declared(rule).items()}
    return {f"{type(rule).__name__}.{name}": size for name, size in sizes.items() if size > 0}


# ---- between server and clients


def at_clients(rule: object) -> bool:
    """Whether clients keep something."""
    return any(entry.at_client for entry in declared(rule).values())


def for_one(rule: object, client_id: int) -> dict[str, Any]:
    """What the server sends to one client alone, not copied."""
    sent = [name for name, entry in declared(rule).items() if entry.sent == "owner"]
    return {name: plain(getattr(rule, name)[client_id]) for name in sent if client_id in getattr(rule, name)}


def take(rule: object, to_all: Mapping[str, Any]) -> None:
    """At a client: a rule takes what the server sends to every client, in place of all that it has."""
    _only(rule, to_all, [name for name, entry in declared(rule).items() if entry.sent == "all"])
    load(rule, to_all)


def take_own(rule: object, client_id: int, to_one: Mapping[str, Any]) -> None:
    """At a client: a rule takes what the server sends to this client alone."""
    entries = declared(rule)
    _only(rule, to_one, [name for name, entry in entries.items() if entry.sent == "owner"])
    for name, value in to_one.items():
        getattr(rule, name)[client_id] = restored(entries[name].kind, value)


def keep(rule: object, client_id: int, kept: Mapping[str, Any], when: int) -> None:
    """The client's report entered the step of round ``when``: what it kept of its visit replaces what it had."""
    _only(rule, kept, [name for name, entry in declared(rule).items() if entry.at_client])
    for name, value in kept.items():
        getattr(rule, name).keep(client_id, restored(Snapshot, value), when)


def _only(rule: object, given: Mapping[str, Any], names: list[str]) -> None:
    if not given.keys() <= set(names):
        raise ValueError(f"{type(rule).__name__} keeps {names} here, found {sorted(given)}")


# ---- what several processes hold in columns, on its way into a checkpoint and out of it


@dataclass(frozen=True)
class ColumnPart:
    """A tensor ``[..., numel]`` of which this process holds some columns."""

    values: Tensor
    columns: Columns

    def whole(self) -> Tensor:
        """``[..., n]`` on the CPU of the first process, nothing elsewhere; all call it at the same places."""
        first, *outer = self.columns.share == 0, *self.values.shape[:-1]
        rows = self.values.reshape(prod(outer), self.values.shape[-1])
        joined = [row.cpu() if first else row[:0] for row in map(self.columns.joined, rows)]
        shape = (*outer, self.columns.total)
        empty = torch.empty(0, self.columns.total, dtype=rows.dtype)
        return torch.stack(joined).view(shape) if first and joined else empty


def in_columns(state: Mapping[str, Any], names: Sequence[str] | None, columns: Columns) -> dict[str, Any]:
    """A rule's state for a checkpoint: what lies in columns is marked, if several processes share them."""
    if len(columns.spans) == 1:
        return dict(state)
    return _changed(state, names or (), lambda value: ColumnPart(value, columns))


def for_columns(state: Mapping[str, Any], names: Sequence[str] | None, columns: Columns) -> dict[str, Any]:
    """A rule's state from a checkpoint, or from an earlier fit, for a process with these columns."""

    def mine(value: Any) -> Tensor:
        if isinstance(value, ColumnPart):
            return value.values
        return columns.part(value) if value.shape[-1] == columns.total else value

    return _changed(state, names or (), mine)


def _changed(state: Mapping[str, Any], names: Sequence[str], change: Callable[[Any], Any]) -> dict[str, Any]:
    result = dict(state)
    for name in names:
        head, _, rest = name.partition(".")
        if head in result:
            result[head] = _changed(result[head], (rest,), change) if rest else _every(result[head], change)
    return result


def _every(value: Any, change: Callable[[Any], Any], kinds: tuple[type, ...] = (Tensor, ColumnPart)) -> Any:
    """The same dicts and lists with what is of some kinds changed."""
    if isinstance(value, Mapping):
        return {name: _every(entry, change, kinds) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_every(entry, change, kinds) for entry in value)
    return change(value) if isinstance(value, kinds) else value


def holds_parts(state: Any) -> bool:
    """Whether something in a state lies in columns."""
    found: list[ColumnPart] = []
    _every(state, found.append, (ColumnPart,))
    return bool(found)


def joined(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with whole tensors in place of what lies in columns; all processes call it at the same places."""
    whole: dict[str, Any] = _every(state, ColumnPart.whole, (ColumnPart,))
    return whole
