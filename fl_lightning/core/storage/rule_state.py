# SPDX-License-Identifier: Apache-2.0
"""The state of a rule, by what its class declares: in checkpoints, in messages, over processes, and taken back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from fl_lightning.core.model_snapshot import Snapshot
from fl_lightning.core.storage.declared import Declared, Extent, plain, restored
from fl_lightning.core.storage.per_client import PerClient
from fl_lightning.core.updates import Columns

Rule = TypeVar("Rule")


def declared(rule: object) -> dict[str, Declared[Any]]:
    """What the class of a rule and its base classes declare, by name."""
    found: dict[str, Declared[Any]] = {}
    for kind in reversed(type(rule).__mro__):
        found |= {name: entry for name, entry in vars(kind).items() if name in found or isinstance(entry, Declared)}
    return {name: entry for name, entry in found.items() if isinstance(entry, Declared)}


def state_dict(rule: object, columns: Columns | None = None) -> dict[str, Any]:
    """What a checkpoint holds of a rule, by name, but for ``None``; memory is shared.

    Tensors of which this process has some of the ``columns`` alone are marked as :class:`ColumnShard`.
    """
    entries = declared(rule)
    states = _states(rule, entries)
    if columns is None or len(columns.spans) == 1:
        return states
    return {name: entries[name].by_column(value, partial(shard_of, rule, columns)) for name, value in states.items()}


def _states(rule: object, entries: Mapping[str, Declared[Any]]) -> dict[str, Any]:
    states = {name: entry.state(getattr(rule, name)) for name, entry in entries.items()}
    return {name: value for name, value in states.items() if value is not None}


def reset(rule: object) -> None:
    """A rule forgets everything."""
    for name in declared(rule):
        vars(rule).pop(name, None)


def load_state_dict(
    rule: object, states: Mapping[str, Any], columns: Columns | None = None, ids: Mapping[int, int] | None = None
) -> None:
    """Restores what :func:`state_dict` returned, with ``columns`` also whole tensors; what it lacks begins anew.

    ``ids`` are those that clients have now, by those that they had.
    """

    def mine(value: Any) -> Tensor:
        if isinstance(value, ColumnShard):
            return value.values
        return columns.part(value) if columns is not None and value.shape[-1:] == (columns.total,) else value

    entries, loaded = declared(rule), {}
    _only(rule, states, list(entries))
    for name, value in states.items():
        state = entries[name].renumbered(value, ids) if ids else value
        loaded[name] = entries[name].loaded(rule, entries[name].by_column(state, mine))
    reset(rule)
    vars(rule).update(loaded)


def renumbering(states: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[int, int], list[str]]:
    """What :func:`matched` says of a checkpoint; where clients have no names, there or now, they keep their numbers."""
    before = [*states["fit"].get("names", ()), *states.get("gone", ())]
    return matched(before, names) if before and isinstance(names, tuple) else ({}, [])


def matched(before: Sequence[str], names: Sequence[str]) -> tuple[dict[int, int], list[str]]:
    """Ids that clients have now, by those that they had, and who is gone: their ids follow the others'."""
    places = {name: place for place, name in enumerate(names)}
    gone = [name for name in before if name not in places]
    places |= {name: len(names) + place for place, name in enumerate(gone)}
    return {place: places[name] for place, name in enumerate(before)}, gone


def set_num_clients(rule: object, clients: int) -> None:
    """So many clients are registered; a rule does not see what others had, who may come back."""
    for name in declared(rule):
        value = getattr(rule, name)
        if isinstance(value, PerClient):
            value.set_num_clients(clients)


def copy_with(rule: Rule, states: Mapping[str, Any], ids: Mapping[int, int] | None = None) -> Rule:
    """Another rule, as this one was when :func:`state_dict` returned these; this one stays as it is."""
    other = copy(rule)
    load_state_dict(other, states, ids=ids)
    return other


def transaction(*rules: object) -> Callable[[bool], None]:
    """Called before a round; what is returned is called with whether it counts. If not, rules become what they were."""
    ends = [entry.transaction(rule) for rule in rules for entry in declared(rule).values()]

    def commit_or_undo(happened: bool) -> None:
        for end in ends:
            end(happened)

    return commit_or_undo


# ---- columns, places and bytes


def set_columnwise(kind: type[Any], *work: str) -> None:
    """Says of a new class whether it may get a shard of the columns, where it does such work and does not say so.

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
    """Attributes that say where state lies, and change no result."""
    return {name for rule in rules for entry in declared(rule).values() for name in entry.placement}


def max_nbytes(rule: object, extent: Extent) -> dict[str, int]:
    """Bytes that a rule will hold at most, by name."""
    sizes = {name: entry.max_nbytes(rule, extent) for name, entry in declared(rule).items()}
    return {f"{type(rule).__name__}.{name}": size for name, size in sizes.items() if size > 0}


# ---- between server and clients


def has_local_state(rule: object) -> bool:
    """Whether clients have a state of their own."""
    return any(entry.at_client for entry in declared(rule).values())


def in_memory(rule: object) -> None:
    """At a client, whose store has its state in files: a rule has it in memory, whatever its arguments say."""
    for entry in declared(rule).values():
        if entry.files is not None:
            setattr(rule, entry.files, None)


def broadcast(rule: object) -> dict[str, Any]:
    """What the server sends to every client, not copied."""
    return _states(rule, {name: entry for name, entry in declared(rule).items() if entry.sent == "all"})


def client_state(rule: object, client_id: int) -> dict[str, Any]:
    """What the server sends to one client alone, not copied."""
    return _client_values(rule, client_id, [name for name, entry in declared(rule).items() if entry.sent == "owner"])


def local_state(rule: object, client_id: int) -> dict[str, Any]:
    """What lies at one client, in a simulation of all, not copied."""
    return _client_values(rule, client_id, [name for name, entry in declared(rule).items() if entry.at_client])


def _client_values(rule: object, client_id: int, names: Sequence[str]) -> dict[str, Any]:
    return {name: plain(getattr(rule, name)[client_id]) for name in names if client_id in getattr(rule, name)}


def load_broadcast(rule: object, states: Mapping[str, Any]) -> None:
    """At a client: a rule takes what :func:`broadcast` returned, in place of all that it has."""
    _only(rule, states, [name for name, entry in declared(rule).items() if entry.sent == "all"])
    load_state_dict(rule, states)


def load_client_state(rule: object, client_id: int, states: Mapping[str, Any]) -> None:
    """At a client: a rule takes what :func:`client_state` returned."""
    entries = declared(rule)
    _only(rule, states, [name for name, entry in entries.items() if entry.sent == "owner"])
    for name, value in states.items():
        getattr(rule, name)[client_id] = restored(entries[name].kind, value)


def set_local_state(rule: object, client_id: int, states: Mapping[str, Any], when: int) -> None:
    """The client's report entered the step of round ``when``: what its visit left at it replaces what it had."""
    _only(rule, states, [name for name, entry in declared(rule).items() if entry.at_client])
    for name, value in states.items():
        getattr(rule, name).keep(client_id, restored(Snapshot, value), when)


def _only(rule: object, given: Mapping[str, Any], names: list[str]) -> None:
    if not given.keys() <= set(names):
        raise ValueError(f"{type(rule).__name__} declares {names} here, found {sorted(given)}")


# ---- tensors whose columns are divided among processes, on their way into a checkpoint and out of it


@dataclass(frozen=True)
class ColumnShard:
    """A tensor ``[..., numel]`` of which this process holds some columns."""

    values: Tensor
    columns: Columns

    def whole(self) -> Tensor:
        """``[..., n]`` on the CPU of the first process, nothing elsewhere; all call it at the same places."""
        first, *outer = self.columns.shard == 0, *self.values.shape[:-1]
        rows = self.values.reshape(prod(outer), self.values.shape[-1])
        whole = [row.cpu() if first else row[:0] for row in map(self.columns.joined, rows)]
        shape = (*outer, self.columns.total)
        empty = torch.empty(0, self.columns.total, dtype=rows.dtype)
        return torch.stack(whole).view(shape) if first and whole else empty


def shard_of(rule: object, columns: Columns, value: Tensor) -> ColumnShard:
    """Marks a tensor of a rule; raises ValueError if it has another number of columns than the process."""
    if value.numel() > 0 and value.shape[-1:] != (columns.numel,):
        raise ValueError(
            f"{type(rule).__name__} must hold a number per parameter, {columns.numel} on this process, found shape "
            f"{list(value.shape)}: let what has another shape begin with a tensor, as in server_state(torch.zeros(0)), "
            "or say columnwise = False"
        )
    return ColumnShard(value, columns)


def without_shards(state: Any) -> Any:
    """The state without what lies in columns."""
    return _every(state, lambda part: None)


def _every(value: Any, change: Callable[[ColumnShard], Any]) -> Any:
    """The same dicts and lists with what lies in columns changed."""
    if isinstance(value, Mapping):
        return {name: _every(entry, change) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_every(entry, change) for entry in value)
    return change(value) if isinstance(value, ColumnShard) else value


def has_shards(state: Any) -> bool:
    """Whether something in a state lies in columns."""
    found: list[ColumnShard] = []
    _every(state, found.append)
    return bool(found)


def full_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with whole tensors in place of what lies in columns; all processes call it at the same places."""
    whole: dict[str, Any] = _every(state, ColumnShard.whole)
    return whole
