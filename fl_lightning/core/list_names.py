# SPDX-License-Identifier: Apache-2.0
"""Lists in which a module gathers outputs, found by name, in this process as in its copies."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torchmetrics import MetricCollection

from fl_lightning.core.module_state import plain_attributes
from fl_lightning.core.modules import outside_metrics, submodules
from fl_lightning.core.watched_list import Watched, WatchedDeque, WatchedList

_DICTS = (dict, defaultdict, OrderedDict)
_DEEP, _MANY = 4, 64  # containers within containers, and the most that one of them may hold


class ListName(NamedTuple):
    """Where a module keeps a list: the submodule, the attribute, and keys in containers from there on."""

    part: str
    attribute: str
    keys: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return ".".join(filter(None, (self.part, self.attribute))) + "".join(f"[{key!r}]" for key in self.keys)


def lists_in(module: nn.Module) -> dict[ListName, Any]:
    """The lists, and deques without a limit, in plain attributes of a module and in containers there.

    Outer ones come first. Those of torchmetrics are not among them.
    """
    found: dict[ListName, Any] = {}
    for part, owner in outside_metrics(submodules(module)):
        if not isinstance(owner, MetricCollection):
            for attribute, value in plain_attributes(owner).items():
                found.update(_lists(ListName(part, attribute), value))
    return found


def _lists(name: ListName, value: Any) -> Iterator[tuple[ListName, Any]]:
    if type(value) is list or (type(value) is deque and value.maxlen is None):
        yield name, value
    elif type(value) not in _DICTS:
        return
    if len(name.keys) < _DEEP and len(value) <= _MANY:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _lists(name._replace(keys=(*name.keys, key)), item)


def find_list(module: nn.Module, name: ListName) -> Any:
    """The list of that name; ``None`` if there is none."""
    owner, key = _owner(module, name)
    try:
        value = owner[key]
    except (LookupError, TypeError):
        return None
    return value if isinstance(value, (list, deque)) else None


def made_list(module: nn.Module, name: ListName) -> Any:
    """The list of that name, which is made if a dictionary lacks its key; ``None`` if there is no place for it."""
    owner, key = _owner(module, name)
    if name.keys and isinstance(owner, dict) and key not in owner:
        owner[key] = []
    return find_list(module, name)


def watch_list(module: nn.Module, name: ListName) -> Watched | None:
    """Puts a list that notes its use in the place of another one, for good; ``None`` if there is no place for it."""
    found = made_list(module, name)
    if found is None:
        return None
    owner, key = _owner(module, name)
    owner[key] = watched = WatchedDeque() if isinstance(found, deque) else WatchedList()
    watched.empty()
    return watched


def put_list(module: nn.Module, name: ListName, items: Any) -> None:
    """Puts a list in the place of the one of that name; ``None`` takes it out of its dictionary."""
    owner, key = _owner(module, name)
    if items is not None:
        owner[key] = items
    elif owner is not None:
        owner.pop(key, None)


def grown_lists(module: nn.Module, lengths: Mapping[ListName, int]) -> list[ListName]:
    """Cuts lists to the lengths that they had, and takes new ones out of dictionaries.

    Returns:
        Which lists were longer or are new.
    """
    grown: list[ListName] = []
    for name, items in lists_in(module).items():
        if find_list(module, name) is not items:
            continue  # it was in what has been cut off
        owner, key = _owner(module, name)
        if name not in lengths and name.keys and isinstance(owner, dict):
            del owner[key]
            grown.append(name)
        elif len(items) > lengths.get(name, len(items)):
            while len(items) > lengths[name]:
                items.pop()
            grown.append(name)
    return grown


def _owner(module: nn.Module, name: ListName) -> tuple[Any, Any]:
    """What holds the list, a dictionary of attributes or a container, and its key there."""
    part = dict(submodules(module)).get(name.part)
    owner: Any = None if part is None else vars(part)
    *outer, key = (name.attribute, *name.keys)
    try:
        for step in outer:
            owner = owner[step]
    except (LookupError, TypeError):
        owner = None
    return owner, key
