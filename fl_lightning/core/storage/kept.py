# SPDX-License-Identifier: Apache-2.0
"""What follows from a rule's declarations: checkpoints, messages, memory, columns, and rounds that do not count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
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


def settle_columnwise(kind: type[Any], *work: str) -> None:
    """Says of a new class whether it may get a share of the columns, where it does such work and does not say so.

    It may if it is one of this package, all of which the contract suites run on shares. Of others it is not known.
    """
    for each in kind.__mro__:
        own = vars(each)
        if "columnwise" in own:
            return
        if any(name in own for name in work):
            if not each.__module__.startswith("fl_lightning."):
                kind.columnwise = False
            return


def in_columns(rule: object) -> list[str]:
    """Names of what has a number per column."""
    return [name for name, entry in declared(rule).items() if entry.in_columns]


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


def in_memory(rule: object) -> None:
    """At a client, whose store has it in files: a rule that begins keeps it in memory, whatever its arguments say."""
    for entry in declared(rule).values():
        if entry.files is not None:
            setattr(rule, entry.files, None)


def for_one(rule: object, client_id: int) -> dict[str, Any]:
    """What the server sends to one client alone, not copied."""
    return _of_one(rule, client_id, [name for name, entry in declared(rule).items() if entry.sent == "owner"])


def of_one(rule: object, client_id: int) -> dict[str, Any]:
    """What one client keeps, in a simulation of all, not copied."""
    return _of_one(rule, client_id, [name for name, entry in declared(rule).items() if entry.at_client])


def _of_one(rule: object, client_id: int, names: Sequence[str]) -> dict[str, Any]:
    return {name: plain(getattr(rule, name)[client_id]) for name in names if client_id in getattr(rule, name)}


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


def saved(rule: object, columns: Columns) -> dict[str, Any]:
    """What :func:`state` returns, where what has a number per column is marked if several processes share these."""
    return state(rule) if len(columns.spans) == 1 else _by_column(rule, state(rule), partial(part_of, rule, columns))


def part_of(rule: object, columns: Columns, value: Tensor) -> ColumnPart:
    """Marks a tensor that a rule keeps; raises ValueError if it has another number of columns than the process."""
    if value.numel() > 0 and value.shape[-1:] != (columns.numel,):
        raise ValueError(
            f"{type(rule).__name__} must keep a tensor per parameter, {columns.numel} on this process, found shape "
            f"{list(value.shape)}: let what has another shape begin with a tensor, as in server_state(torch.zeros(0)), "
            "or say columnwise = False"
        )
    return ColumnPart(value, columns)


def restore(rule: object, states: Mapping[str, Any], columns: Columns, ids: Mapping[int, int]) -> None:
    """Restores what :func:`saved` returned here, or whole, for a process with these columns; ``ids`` as before."""

    def mine(value: Any) -> Tensor:
        if isinstance(value, ColumnPart):
            return value.values
        return columns.part(value) if value.shape[-1:] == (columns.total,) else value

    load(rule, _by_column(rule, renumbered(rule, states, ids), mine))


def _by_column(rule: object, states: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    entries = declared(rule)
    return {
        name: entries[name].by_column(value, change) if name in entries else value for name, value in states.items()
    }


def common(state: Any) -> Any:
    """The state without what lies in columns."""
    return _every(state, lambda part: None)


def _every(value: Any, change: Callable[[ColumnPart], Any]) -> Any:
    """The same dicts and lists with what lies in columns changed."""
    if isinstance(value, Mapping):
        return {name: _every(entry, change) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_every(entry, change) for entry in value)
    return change(value) if isinstance(value, ColumnPart) else value


def holds_parts(state: Any) -> bool:
    """Whether something in a state lies in columns."""
    found: list[ColumnPart] = []
    _every(state, found.append)
    return bool(found)


def joined(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with whole tensors in place of what lies in columns; all processes call it at the same places."""
    whole: dict[str, Any] = _every(state, ColumnPart.whole)
    return whole
