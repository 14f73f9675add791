# SPDX-License-Identifier: Apache-2.0
"""What was changed in a module beside parameters and buffers, on its way between a server and its clients.

Both sides have a module that was made alike. The server says what rounds have changed since, and a client what its
visit has changed, as plain values: by the names of attributes, as :class:`fl_lightning.clients.module_visits.Left` has
it.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.clients.module_visits import Left, ModuleVisits
from fl_lightning.core.modules import submodules
from fl_lightning.federation.door import STATE_BYTES, MisfitError, said
from fl_lightning.federation.plain_values import Reader, StaysError, Writer, is_own_name
from fl_lightning.lightning.metric_state import MetricShare, defaults_of, joins_clients
from fl_lightning.lightning.module.contents import GENERATORS
from fl_lightning.lightning.module.kept_objects import Added, Kept, Names
from fl_lightning.lightning.module.object_state import ObjectState
from fl_lightning.lightning.names import LightningModule, rank_zero_warn

_UPDATES = 10**9


class Places:
    """The objects of a module by names that copies of it share."""

    def __init__(self, module: nn.Module, state: ObjectState) -> None:
        self.state = state
        self.kept: dict[str, Kept] = {}  # what may change
        self.known: dict[str, Any] = {}  # all that a value may be
        for name, part in submodules(module):
            self.known[f"module {name}"] = part
            for kind, values in (("parameter", part.named_parameters), ("buffer", part.named_buffers)):
                found = values(recurse=False, remove_duplicate=False)
                self.known |= {f"{kind} {name}.{key}": value for key, value in found}
        count = Counter[str]()
        for kept in state.kept:
            self.kept[f"{kept.name}#{count[kept.name]}"] = kept
            count[kept.name] += 1
        self.known |= {name: kept.value for name, kept in self.kept.items()}
        content = [part for kept in state.kept for part, _ in kept.parts()]
        self.classes = {kind.__qualname__: kind for kind in map(type, (*self.known.values(), *content))}
        self.classes |= _classes_beside(type(module))

    @property
    def attributes(self) -> frozenset[str]:
        """Attributes with objects that may change."""
        return frozenset(kept.name for kept in self.state.kept)


def _classes_beside(kind: type) -> dict[str, type]:
    """Classes of the files that define a module's class and its bases, by name."""
    homes = {base.__module__ for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module}
    homes = {home for home in homes if home.partition(".")[0] not in ("torch", "lightning", "pytorch_lightning")}
    files = [vars(sys.modules[home]) for home in sorted(homes) if home in sys.modules]
    found = [value for names in files for value in list(names.values()) if isinstance(value, type)]
    return {value.__qualname__: value for value in found if value.__module__ in homes}


def written(
    left: Left, places: Places, classes: Mapping[str, type], attributes: Collection[str] | None = None
) -> tuple[dict[str, Any], dict[str, str], dict[str, int]]:  # fmt: skip
    """What was changed, as plain values; why what stays cannot travel, and how many values others hold, by attribute.

    ``classes`` are of the objects that the reader can make, ``attributes`` those that it has objects of, too; ``None``:
    all. Others travel as a whole.
    """
    names, stays = {id(kept): name for name, kept in places.kept.items()}, dict[str, str]()
    tasks: list[tuple[str, list[Any], Callable[[list[Any]], object], int | None]] = []
    gathered = Counter[str]()
    bound: dict[str, tuple[dict[str, Any], list[str]]] = {}
    changes, metrics = list[list[Any]](), list[list[Any]]()
    for kept, change in left.changes:
        name = names.get(id(kept))
        if name is None:
            stays |= dict.fromkeys(kept.changed_names(), "it belongs to torch")
        elif not _is_common(name, attributes):  # made by a hook of this side
            owner, _, key = kept.name.rpartition(".")
            now = vars(places.kept[f"{owner}#0"].value) if f"{owner}#0" in places.kept else {}
            if key in now:
                bound.setdefault(f"{owner}#0", ({}, []))[0][key] = now[key]
        elif isinstance(kept, Names):
            more, gone = bound.setdefault(name, ({}, []))
            more.update(change[0])
            gone += change[1]
        else:
            form, values = ("added", change.items) if isinstance(change, Added) else ("whole", [change])
            count = None if isinstance(kept.value, GENERATORS) else len(values) * (form == "added")
            tasks.append((kept.name, values, partial(_append, changes, name, form), count))
    for name, (own, gone) in bound.items():
        owner, holder = places.kept[name].name, places.kept[name].value
        pairs: list[Any] = []
        changes.append([name, "names", pairs, [key for key in gone if is_own_name(holder, key)]])
        for key, value in own.items():
            if is_own_name(holder, key):
                tasks.append((f"{owner}.{key}" if owner else key, [key, value], pairs.extend, 0))
    known = {id(metric): name for name, metric in places.state.metrics.items()}
    for metric, share in left.metrics:
        if share.updates:
            name, states = known[id(metric)], [part for pair in share.state.items() for part in pair]
            count = 0 if any(isinstance(state, list) for state in share.state.values()) else None  # of samples
            tasks.append((name, states, partial(_append, metrics, name, share.updates), count))
    writer = Writer({id(v): name for name, v in places.known.items() if _is_common(name, attributes)}, classes)
    tasks.sort(key=lambda task: sum(map(_weight, task[1])))  # the largest may stay
    for attribute, values, take, count in tasks:
        before = writer.gathered
        try:
            take(writer.tried(values))
            gathered[attribute] += 0 if count is None else count + writer.gathered - before
        except StaysError as reason:
            stays[attribute] = str(reason)
    changes = [change for change in changes if change[1] != "names" or change[2] or change[3]]
    plain = {"nodes": writer.nodes, "changes": changes, "metrics": metrics} if changes or metrics else {}
    return plain, stays, {attribute: count for attribute, count in gathered.items() if count}


def _append(entries: list[Any], name: str, more: Any, written: list[Any]) -> None:
    entries.append([name, more, written])


def _weight(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return len(value) if hasattr(value, "__len__") else 1


def read_left(plain: Mapping[str, Any], places: Places, device: torch.device) -> tuple[Left, set[str]]:
    """What :func:`written` gave, for this module, which is as it was looked at; and attributes that it lacks."""
    if not plain:
        return Left(), set()
    lacking: set[str] = set()
    try:
        nbytes = sum(v.nbytes for node in plain["nodes"] for v in node if isinstance(v, Tensor))
        if nbytes > STATE_BYTES:
            raise ValueError(f"at most {STATE_BYTES} bytes, found {nbytes}")
        reader = Reader(plain["nodes"], places.known, places.classes, device)
        left = Left()
        for name, form, *parts in plain["changes"]:
            kept = places.kept.get(name)
            if kept is None:
                lacking.add(said(str(name).partition("#")[0]))
                continue
            change = _change(kept, form, parts, reader)
            try:
                kept.apply(change)
            finally:
                kept.put(kept.content)
            left.changes.append((kept, change))
        for name, updates, states in plain["metrics"]:
            metric = places.state.metrics.get(name)
            if metric is not None and joins_clients(metric):
                left.metrics.append((metric, _share(metric, reader.pairs(states), updates)))
        return left, lacking
    except Exception as error:  # of values of any kind in the place of others
        raise MisfitError(
            f"what it left in the module cannot be read ({type(error).__name__}: {said(error)})"
        ) from error


def _is_common(name: str, attributes: Collection[str] | None) -> bool:
    attribute, place, _ = name.partition("#")
    return attributes is None or not place or attribute in attributes


def _change(kept: Kept, form: str, parts: Sequence[Any], reader: Reader) -> Any:
    if form == "names" and isinstance(kept, Names):
        bound, gone = reader.pairs(parts[0]), list(parts[1])
        odd = [name for name in (*bound, *gone) if not is_own_name(kept.value, name)]
        if odd:
            raise ValueError(f"{said(odd[0])} is no attribute that a visit may change")
        return bound, gone
    if form == "added" and isinstance(kept.value, (list, deque)):
        return Added(reader.all(parts[0]))
    if form != "whole" or isinstance(kept, Names):
        raise ValueError(f"{type(kept).__name__} cannot have {said(form)}")
    content = reader.of(parts[0][0])
    if type(content) is not type(kept.content):
        raise ValueError(f"{kept.name} must be a {type(kept.content).__name__}, found a {type(content).__name__}")
    if isinstance(content, Tensor):
        if content.dtype != kept.content.dtype or content.layout != kept.content.layout:
            raise ValueError(f"{kept.name} must be {kept.content.dtype}, found {content.dtype}")
        return content.to(kept.content.device)
    return content


def _share(metric: Any, states: Mapping[str, Any], updates: int) -> MetricShare:
    defaults = defaults_of(metric)
    if states.keys() != defaults.keys() or type(updates) is not int or not 0 < updates <= _UPDATES:
        raise ValueError(f"it must have states {list(defaults)}, found {said(list(states))}")
    device, found = metric.device, dict[str, Any]()
    for name, default in defaults.items():
        value = states[name]
        if isinstance(default, list):
            if type(value) is not list or not all(isinstance(item, Tensor) for item in value):
                raise ValueError(f"{name} must be a list of tensors")
            found[name] = [item.to(device) for item in value]
        elif isinstance(default, int):
            if type(value) is not int or not 0 <= value <= updates:
                raise ValueError(f"{name} must be a number of updates, at most {updates}, found {said(value)}")
            found[name] = value
        elif isinstance(value, Tensor) and value.shape == default.shape and value.dtype == default.dtype:
            found[name] = value.to(device)
        else:
            raise ValueError(f"{name} must be {default.dtype} {list(default.shape)}")
    return MetricShare(found, updates, None)


class AwayModule:
    """A client's module, while the client does what a message asks for.

    ``plain`` is what the server has sent of its own, ``said`` what was said of earlier visits and is not said again.
    """

    def __init__(self, module: LightningModule, plain: Mapping[str, Any], said: set[str]) -> None:
        self._module, self._plain, self._said = module, plain, said
        self._stays, self._gathered = dict[str, str](), dict[str, int]()
        self._outer = ModuleVisits(module)

    def __enter__(self) -> AwayModule:
        self._outer.begin()
        return self

    def __exit__(self, *error: object) -> None:
        """The module is as it was; what leaves the client is said before anybody can send it."""
        self._outer.put_back()
        kind = type(self._module).__name__
        self._say(
            f"what a client leaves in {kind} stays at the client, and begins anew in every round, where no message can "
            "hold it", self._stays,
        )  # fmt: skip
        self._say(
            f"what training gathers in {kind} goes to the server, and from there to other clients, unless "
            "on_train_epoch_end empties it", {name: f"{count} values" for name, count in self._gathered.items()},
        )  # fmt: skip

    def _say(self, words: str, found: Mapping[str, str]) -> None:
        new = {name: why for name, why in found.items() if f"{name}: {words}" not in self._said}
        self._said |= {f"{name}: {words}" for name in new}
        if new:
            rank_zero_warn(f"{words}: {'; '.join(f'{name} ({why})' for name, why in new.items())}")

    def take(self) -> None:
        """The hooks before the first round have run: the module becomes what the server's is."""
        self._visit = copy(self._outer)  # has looked at the module already; looks again only if a hook has changed it
        if self._plain:
            module = self._module
            left, _ = read_left(self._plain, Places(module, self._visit.look()), module.device)
            for kept, change in left.changes:
                kept.apply(change)
        self._visit.begin()

    def left(self, withholds: str | None = None) -> dict[str, Any]:
        """What was changed since; nothing if there is a reason to withhold it."""
        left, state = self._visit.end(), self._visit.looked
        alone = {name: f"a {kind}" for name, kind in state.alone.items()}
        alone |= dict.fromkeys(left.ran_on, "a metric whose states cannot be joined")
        if not (left.changes or left.metrics):
            self._stays = alone
            return {}
        before = Places(self._module, self._outer.looked)
        attributes = set(before.attributes)
        for name, form, *parts in self._plain.get("changes", ()):
            if form == "names":
                owner = name.partition("#")[0]
                attributes |= {f"{owner}.{key}" if owner else key for key in parts[0][::2]}
        plain, stays, gathered = written(left, Places(self._module, state), before.classes, attributes)
        if plain and withholds is not None:
            self._stays = {"all of it": withholds}
            return {}
        self._stays, self._gathered = alone | stays, gathered
        return plain
