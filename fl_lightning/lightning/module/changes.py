# SPDX-License-Identifier: Apache-2.0
"""What has changed in a module since a snapshot, as plain values by path, for copies of the module anywhere."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.lightning.metric_state import MetricDelta, defaults_of
from fl_lightning.lightning.module.contents import GENERATOR, is_equal
from fl_lightning.lightning.module.objects import NAMED, Added, Bound, Object
from fl_lightning.lightning.module.plain_values import NO_LIMITS, Limits, Reader, UnwritableError, Writer, is_own_name
from fl_lightning.lightning.module.snapshot import Snapshot

_UPDATES = 10**9


class Change(NamedTuple):
    """What has changed, as plain values.

    ``lost`` says why the change of an attribute is not among them, ``gathered`` how many values others' objects hold.
    """

    plain: Mapping[str, Any] = {}
    lost: Mapping[str, str] = {}
    gathered: Mapping[str, int] = {}


def written(
    snapshot: Snapshot,
    changed: Sequence[Object],
    metrics: Mapping[str, MetricDelta],
    limits: Limits = NO_LIMITS,
    attributes: Collection[str] | None = None,
) -> Change:
    """What was changed in objects of a snapshot, and what was added to metrics.

    ``attributes`` are those of which the reader has objects, too; ``None``: all. Others are written as a whole.
    """
    shared, lost, gathered = snapshot.shared, dict[str, str](), Counter[str]()
    changes, joined = list[list[Any]](), list[list[Any]]()
    tasks: list[tuple[str, list[Any], Callable[[list[Any]], object], int | None]] = []
    bound: dict[str, tuple[str, Bound]] = {}
    before: dict[str, Any] = {}
    for found in changed:
        path, change = shared.paths.get(id(found.value)), found.change()
        if path is None:
            names = found.changed_names()
            if found is snapshot.buffers:  # others see to those that were there
                names = [
                    at + key for at, table in change.items() for key in table if key not in found.content.get(at, {})
                ]
            lost |= dict.fromkeys(names, "register it in __init__")
        elif not _has(attributes, path):  # made by a hook of this side
            owner, _, key = found.name.rpartition(".")
            now = vars(shared.by_path.get(f"module {owner}", snapshot))
            if key in now:
                bound.setdefault(f"module {owner}", (owner, Bound({}, [])))[1].values[key] = now[key]
        elif isinstance(change, Bound):
            more = bound.setdefault(path, (found.name, Bound({}, [])))[1]
            more.values.update(change.values)
            more.gone.extend(change.gone)
        else:
            form, values = ("added", change.items) if isinstance(change, Added) else ("whole", [change])
            count = None if found.kind is GENERATOR else len(values) * (form == "added")
            tasks.append((found.name, values, partial(_append, changes, path, form), count))
    for path, (owner, (own, gone)) in bound.items():
        pairs, holder = list[Any](), shared.by_path[path]
        changes.append([path, "names", pairs, [key for key in gone if is_own_name(holder, key)]])
        for key, value in own.items():
            if is_own_name(holder, key):
                attribute = f"{owner}.{key}" if owner else key
                before[attribute] = snapshot.by_path[path, True].content.get(key)
                tasks.append((attribute, [key, value], pairs.extend, 0))
    for name, delta in metrics.items():
        states = [part for pair in delta.state.items() for part in pair]
        count = 0 if any(isinstance(state, list) for state in delta.state.values()) else None  # of samples
        tasks.append((name, states, partial(_append, joined, name, delta.updates), count))
    writer = Writer(shared, limits, partial(_has, attributes))
    for attribute, values, take, count in sorted(tasks, key=lambda task: sum(map(_weight, task[1]))):
        held = writer.gathered
        try:
            take(writer.tried(values))
            gathered[attribute] += 0 if count is None else count + writer.gathered - held
        except UnwritableError as reason:
            if not is_equal(values[-1], before.get(attribute)):  # caches are bound to the same again
                lost[attribute] = str(reason)
    changes = [change for change in changes if change[1] != "names" or change[2] or change[3]]
    plain = {"nodes": writer.nodes, "changes": changes, "metrics": joined} if changes or joined else {}
    return Change(plain, lost, {attribute: count for attribute, count in gathered.items() if count})


def _append(entries: list[Any], name: str, more: Any, values: list[Any]) -> None:
    entries.append([name, more, values])


def _weight(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return len(value) if hasattr(value, "__len__") else 1


def _has(attributes: Collection[str] | None, path: str) -> bool:
    attribute, place, _ = path.partition("#")
    return attributes is None or not place or attribute in attributes


def on_cpu(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A change with its tensors on the CPU, as messages and files have them."""
    nodes = [[part.cpu() if isinstance(part, Tensor) else part for part in node] for node in plain.get("nodes", ())]
    return {**plain, "nodes": nodes} if plain else {}


class Read(NamedTuple):
    """What :func:`written` gave, for objects of this side; ``lacking`` are attributes with objects that it has not."""

    changes: Sequence[tuple[Object, Any]] = ()
    metrics: Sequence[tuple[Metric, MetricDelta]] = ()
    lacking: Collection[str] = ()


def read(plain: Mapping[str, Any], snapshot: Snapshot, device: torch.device) -> Read:
    """What was written, for the module of a snapshot; raises anything where it was a stranger who has written it."""
    if not plain:
        return Read()
    reader = Reader(plain["nodes"], snapshot.shared, device)
    changes, metrics = list[tuple[Object, Any]](), list[tuple[Metric, MetricDelta]]()
    lacking = set[str]()
    for path, form, *parts in plain["changes"]:
        found = snapshot.by_path.get((path, form == "names"))
        if found is None and path in snapshot.shared.by_path:
            raise ValueError(f"{path} cannot have {form}")
        if found is None:
            lacking.add(str(path).partition("#")[0])
        else:
            changes.append((found, _change(found, form, parts, reader)))
    for name, updates, states in plain["metrics"]:
        metric = snapshot.joined.get(name)
        if metric is not None:
            metrics.append((metric, _delta(metric, reader.pairs(states), updates)))
    return Read(changes, metrics, lacking)


def _change(found: Object, form: str, parts: Sequence[Any], reader: Reader) -> Any:
    if form == "names":
        own, gone = reader.pairs(parts[0]), list(parts[1])
        odd = [name for name in (*own, *gone) if not is_own_name(found.value, name)]
        if odd or type(own.get("training", True)) is not bool:
            raise ValueError(f"{odd or ['training']} are no attributes that a visit may change so")
        return Bound(own, gone)
    if form == "added" and isinstance(found.value, (list, deque)):
        return Added(reader.all(parts[0]))
    if form != "whole":
        raise ValueError(f"a {type(found.value).__name__} cannot have {form}")
    content = reader.of(parts[0][0])
    if type(content) is not type(found.content):
        raise ValueError(f"{found.name} must be a {type(found.content).__name__}, found a {type(content).__name__}")
    if isinstance(content, Tensor):
        if content.dtype != found.content.dtype or content.layout != found.content.layout:
            raise ValueError(f"{found.name} must be {found.content.dtype}, found {content.dtype}")
        return content.detach().to(found.content.device)
    return content


def _delta(metric: Any, states: Mapping[str, Any], updates: int) -> MetricDelta:
    defaults = defaults_of(metric)
    if states.keys() != defaults.keys() or type(updates) is not int or not 0 < updates <= _UPDATES:
        raise ValueError(f"it must have states {list(defaults)}, found {list(states)}")
    device, found = metric.device, dict[str, Any]()
    for name, default in defaults.items():
        value = states[name]
        if isinstance(default, list):
            if type(value) is not list or not all(isinstance(item, Tensor) for item in value):
                raise ValueError(f"{name} must be a list of tensors")
            found[name] = [item.to(device) for item in value]
        elif isinstance(default, int):
            if type(value) is not int or not 0 <= value <= updates:
                raise ValueError(f"{name} must be a number of updates, at most {updates}, found {value}")
            found[name] = value
        elif isinstance(value, Tensor) and value.shape == default.shape and value.dtype == default.dtype:
            found[name] = value.to(device)
        else:
            raise ValueError(f"{name} must be {default.dtype} {list(default.shape)}")
    return MetricDelta(found, updates, None)


def merge(changes: Sequence[Read], chosen: Read | None) -> None:
    """Joins what several have changed, in their order; attributes are those of the one who is ``chosen``, if any."""
    by_object: dict[int, list[tuple[Object, Any, bool]]] = {}
    for one in changes:
        for found, change in one.changes:
            by_object.setdefault(id(found), []).append((found, change, one is chosen))
        for metric, delta in one.metrics:
            delta.add_to(metric)
    for group in by_object.values():
        found, only_added = group[0][0], all(isinstance(change, Added) for _, change, _ in group)
        new = {} if only_added else _new_lists(found, [change for _, change, _ in group])
        for _, change, is_chosen in group:
            if only_added or is_chosen:
                found.apply(change)
        found.apply(Bound(new, [])) if found.kind in NAMED else new and found.value.update(new)


def _new_lists(found: Object, changes: Sequence[Any]) -> dict[Any, Any]:
    """Lists and deques under names that were not there, with what all have in them."""
    new: dict[Any, Any] = {}
    if isinstance(found.content, dict) and found.kind is not GENERATOR:
        for change in changes:
            for name, value in (change.values if isinstance(change, Bound) else change).items():
                if type(value) in (list, deque) and name not in found.content:
                    new.setdefault(name, type(value)()).extend(value)
    return new
