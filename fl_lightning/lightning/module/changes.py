# SPDX-License-Identifier: Apache-2.0
"""What has changed in a module since a snapshot, as plain values by path, for copies of the module anywhere."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.lightning.metric_state import MetricDelta, defaults_of
from fl_lightning.lightning.module.objects import Attributes, Object
from fl_lightning.lightning.module.plain_values import NO_LIMITS, Limits, Reader, UnwritableError, Writer
from fl_lightning.lightning.module.snapshot import FRAMEWORK, Snapshot, Tables

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

    ``attributes`` are those of which the reader has objects, too; ``None``: all.
    """
    paths, lost, gathered = snapshot.paths, dict[str, str](), Counter[str]()
    if attributes is not None:
        paths = {at: path for at, path in paths.items() if "#" not in path or path.partition("#")[0] in attributes}
    tasks = list[tuple[str, list[Any], list[Any], bool]]()  # the attribute, what it is, its values, whether they count
    for found in changed:
        path = paths.get(id(found.value))
        if path is None:  # a visit has made it, or a hook of this side, or it is none that anybody may change
            names = found.changed_names(new=True) if isinstance(found, Tables) else found.changed_names()
            lost |= dict.fromkeys(names, "make it in __init__")
            continue
        for form, values in found.edits():
            name = found.shown_as(values[0]) if isinstance(found, Attributes) else found.name
            if not isinstance(found, Attributes) or is_own_name(found.value, values[0]):
                tasks.append((name, ["changes", path, form], values, found.gathers))
            elif (
                values[0] not in FRAMEWORK and type(getattr(type(found.value), values[0], None)) is not cached_property
            ):
                lost[name] = "it hides a part of its class"
    for name, delta in metrics.items():
        states = [part for pair in delta.state.items() for part in pair]
        of_samples = any(isinstance(state, list) for state in delta.state.values())
        tasks.append((name, ["metrics", name, delta.updates], states, of_samples))
    writer, plain = Writer(paths, limits), {"changes": list[Any](), "metrics": list[Any]()}
    for attribute, (at, *what), values, counts in sorted(tasks, key=lambda task: sum(map(_weight, task[2]))):
        held = writer.gathered
        try:
            plain[at].append([*what, writer.tried(values)])
            gathered[attribute] += counts and writer.gathered - held + len(values) * (what[1] == "added")
        except UnwritableError as reason:
            lost[attribute] = str(reason)
    return Change({"nodes": writer.nodes, **plain} if any(plain.values()) else {}, lost, +gathered)


def _weight(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return len(value) if hasattr(value, "__len__") else 1


def on_cpu(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A change with its tensors on the CPU, as messages and files have them."""
    nodes = [[part.cpu() if isinstance(part, Tensor) else part for part in node] for node in plain.get("nodes", ())]
    return {**plain, "nodes": nodes} if plain else {}


class Read(NamedTuple):
    """What :func:`written` gave, for objects of this side; ``lacking`` are attributes with objects that it has not."""

    changes: Sequence[tuple[Object, str, list[Any]]] = ()
    metrics: Sequence[tuple[Metric, MetricDelta]] = ()
    lacking: Collection[str] = ()


def read(plain: Mapping[str, Any], snapshot: Snapshot, device: torch.device) -> Read:
    """What was written, for the module of a snapshot; raises anything where it was a stranger who has written it."""
    if not plain:
        return Read()
    reader = Reader(plain["nodes"], snapshot.by_path, device)
    changes, metrics = list[tuple[Object, str, list[Any]]](), list[tuple[Metric, MetricDelta]]()
    lacking = set[str]()
    for path, form, values in plain["changes"]:
        if path in snapshot.by_path:
            found = snapshot.find(path, of_attributes=form in ("bound", "gone"))
            changes.append((found, form, _checked(found, form, reader.all(values))))
        else:
            lacking.add(str(path).partition("#")[0])
    for name, updates, states in plain["metrics"]:
        metric = snapshot.joined.get(name)
        if metric is not None:
            metrics.append((metric, _delta(metric, reader.pairs(states), updates)))
    return Read(changes, metrics, lacking)


def _checked(found: Object, form: str, values: list[Any]) -> list[Any]:
    if isinstance(found, Attributes):
        name, *value = values
        if not is_own_name(found.value, name) or (name == "training" and type(value[0]) is not bool):
            raise ValueError(f"{name} is no attribute that a visit may change so")
    elif form == "whole":
        (content,), then = values, found.content
        if type(content) is not type(then) or (isinstance(content, Tensor) and content.dtype != then.dtype):
            kinds = [getattr(value, "dtype", type(value).__name__) for value in (then, content)]
            raise ValueError(f"{found.name} must be a {kinds[0]}, found a {kinds[1]}")
        if isinstance(content, Tensor):
            return [content.detach().to(then.device)]
    elif form != "added" or not isinstance(found.value, (list, deque)):
        raise ValueError(f"a {type(found.value).__name__} cannot have {form}")
    return values


def is_own_name(owner: object, name: object) -> bool:
    """Whether somebody else may bind this attribute: it hides nothing of the class's code, and no part of a module."""
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("__") or len(name) > 200:
        return False
    tables = (FRAMEWORK, owner._parameters, owner._buffers, owner._modules) if isinstance(owner, nn.Module) else ()
    if any(name in table for table in tables):
        return name == "training"
    found = getattr(type(owner), name, None)
    return not callable(found) and (not hasattr(found, "__get__") or type(found).__name__ == "member_descriptor")


def _delta(metric: Metric, states: Mapping[str, Any], updates: int) -> MetricDelta:
    defaults, device, found = defaults_of(metric), metric.device, dict[str, Any]()
    if states.keys() != defaults.keys() or type(updates) is not int or not 0 < updates <= _UPDATES:
        raise ValueError(f"it must have states {list(defaults)}, found {list(states)}")
    for name, default in defaults.items():
        value = states[name]
        fits = isinstance(value, Tensor) if isinstance(default, Tensor) else type(value) is type(default)
        if fits and isinstance(default, list):
            fits, value = all(isinstance(item, Tensor) for item in value), [item.to(device) for item in value]
        elif fits and isinstance(default, Tensor):
            fits, value = value.shape == default.shape and value.dtype == default.dtype, value.to(device)
        elif fits:
            fits = 0 <= value <= updates
        if not fits:
            raise ValueError(f"{name} must be like {default}")
        found[name] = value
    return MetricDelta(found, updates, None)


def merge(changes: Sequence[Read], chosen: Read | None) -> None:
    """Joins what several have changed, in their order.

    Lists have what all have added if nobody did more than that. All else is as the one who is ``chosen`` has left it.
    """
    by_object: dict[int, list[tuple[Object, str, list[Any], bool]]] = {}
    for one in changes:
        for found, form, values in one.changes:
            by_object.setdefault(id(found), []).append((found, form, values, one is chosen))
        for metric, delta in one.metrics:
            delta.add_to(metric)
    for group in by_object.values():
        all_added = all(form == "added" for _, form, _, _ in group)
        for found, form, values, is_chosen in group:
            if all_added or is_chosen:
                found.apply(form, values)
