# SPDX-License-Identifier: Apache-2.0
"""Mutable objects and what they held at a moment: compared, put back in place, and changed to what others hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from operator import is_
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.lightning.metric_state import beside_states
from fl_lightning.lightning.module.contents import LIBRARIES, NUMBERS, OTHERS, SHARED, SYSTEM, How, is_equal


class Kept:
    """One object and what it held when it was looked at; ``name`` is the module's attribute that leads to it."""

    how: How

    def __init__(self, value: Any, name: str, how: How | None = None) -> None:
        self.value, self.name = value, name
        if how is not None:
            self.how = how
        self.content = self.now()

    def now(self) -> Any:
        """What it holds now; later changes of the object do not reach it."""
        return self.how.read(self.value)

    def is_same(self) -> bool:
        """Whether it holds what it held; other objects in it are looked at by themselves."""
        return self.how.same(self.value, self.content)

    def put(self, content: Any) -> None:
        """Lets it hold what :meth:`now` returned."""
        self.how.write(self.value, content)

    def change(self) -> Any:
        """What :meth:`apply` needs to repeat what has happened to it since."""
        return self.now()

    def apply(self, change: Any) -> None:
        """Repeats what :meth:`change` returned."""
        self.put(change)

    def changed_names(self) -> list[str]:
        """The attributes of the module that a change shows in."""
        return [self.name]

    def new_lists(self, change: Any) -> dict[Any, Any]:
        """Lists and deques in a change under names that were not there."""
        return {}

    def bind(self, values: dict[Any, Any]) -> None:
        """Binds values to names."""

    def parts(self) -> Iterable[tuple[Any, str]]:
        """Objects in the content, and the attributes from which they are reached."""
        return [(part, self.name) for part in self.how.parts(self.content)]


class Names(Kept):
    """Attributes of an object: in ``__dict__`` and in slots."""

    def now(self) -> dict[str, Any]:
        """See :meth:`Kept.now`."""
        value = self.value
        slots = {name: getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name)}
        return {**slots, **getattr(value, "__dict__", {})}

    def is_same(self) -> bool:
        """See :meth:`Kept.is_same`."""
        return same_entries(self.now(), self.content)

    def put(self, content: dict[str, Any]) -> None:
        """See :meth:`Kept.put`."""
        now = self.now()
        self.apply(
            ({n: v for n, v in content.items() if now.get(n, self) is not v}, [n for n in now if n not in content])
        )

    def change(self) -> tuple[dict[str, Any], list[str]]:
        """What is bound anew, and what is gone."""
        now, then = self.now(), self.content
        return {n: v for n, v in now.items() if then.get(n, self) is not v}, [n for n in then if n not in now]

    def apply(self, change: tuple[dict[str, Any], list[str]]) -> None:
        """See :meth:`Kept.apply`."""
        own, (bound, gone) = getattr(self.value, "__dict__", {}), change
        for name in gone:
            if name in own:
                del own[name]
            elif hasattr(self.value, name):
                object.__delattr__(self.value, name)
        for name, value in bound.items():
            if name in _slots_of(type(self.value)):
                object.__setattr__(self.value, name, value)  # dataclasses may be frozen
            else:
                own[name] = value  # nn.Module's own way of setting one would register it

    def new_lists(self, change: tuple[dict[str, Any], list[str]]) -> dict[str, Any]:
        """See :meth:`Kept.new_lists`."""
        return _lists_in(change[0], self.content)

    def bind(self, values: dict[str, Any]) -> None:
        """See :meth:`Kept.bind`."""
        self.apply((values, []))

    def parts(self) -> Iterable[tuple[Any, str]]:
        """See :meth:`Kept.parts`."""
        return [(value, self.name) for value in self.content.values()]


class Items(Kept):
    """Items of a list, a deque, a dictionary or a set."""

    def now(self) -> Any:
        """See :meth:`Kept.now`."""
        value = self.value
        if isinstance(value, dict):
            return dict(value.items())
        return set(value) if isinstance(value, set) else list(value)

    def is_same(self) -> bool:
        """See :meth:`Kept.is_same`."""
        value, content = self.value, self.content
        if isinstance(value, dict):
            return same_entries(value, content)
        if isinstance(value, set):
            return bool(value == content)
        return len(value) == len(content) and all(map(is_, value, content))

    def put(self, content: Any) -> None:
        """See :meth:`Kept.put`."""
        self.value.clear()
        if isinstance(self.value, (dict, set)):
            self.value.update(content)
        else:
            self.value.extend(content)

    def parts(self) -> Iterable[tuple[Any, str]]:
        """See :meth:`Kept.parts`."""
        content = self.content
        values = [*content.keys(), *content.values()] if isinstance(content, dict) else content
        return [(value, self.name) for value in values]

    def new_lists(self, change: Any) -> dict[Any, Any]:
        """See :meth:`Kept.new_lists`."""
        return _lists_in(change, self.content) if isinstance(self.value, dict) else {}

    def bind(self, values: dict[Any, Any]) -> None:
        """See :meth:`Kept.bind`."""
        if values:
            self.value.update(values)

    def change(self) -> Any:
        """What was added at the end, if nothing else has happened; else what it holds now."""
        content = self.now()
        added = self._added(content)
        return content if added is None else Added(added)

    def apply(self, change: Any) -> None:
        """See :meth:`Kept.apply`."""
        if isinstance(change, Added):
            self.value.extend(change.items)
        else:
            self.put(change)

    def _added(self, content: Any) -> list[Any] | None:
        """What was added; from a deque with a limit the first items may have fallen out meanwhile."""
        before, value = self.content, self.value
        if not isinstance(value, (list, deque)):
            return None
        full = isinstance(value, deque) and len(content) == value.maxlen
        for dropped in range(len(before) + 1 if full else 1):
            rest = before[dropped:]
            if len(rest) <= len(content) and all(map(is_, rest, content)):
                return list(content[len(rest) :])
        return None


class Added(NamedTuple):
    """Items that were added to a list or a deque."""

    items: list[Any]


class Numbers(Kept):
    """What is in a tensor."""

    how = NUMBERS


def same_entries(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    """Whether keys and values are the same objects in the same order."""
    return len(now) == len(then) and all(map(is_, now, then)) and all(map(is_, now.values(), then.values()))


def _lists_in(values: dict[Any, Any], known: dict[Any, Any]) -> dict[Any, Any]:
    return {name: value for name, value in values.items() if type(value) in (list, deque) and name not in known}


_SLOTS: dict[type, tuple[str, ...]] = {}


def _slots_of(kind: type) -> tuple[str, ...]:
    """The slots of a class, by the names under which objects have them: private ones are called ``_Class__name``."""
    if kind not in _SLOTS:
        slotted = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
        _SLOTS[kind] = tuple(n for own in slotted for n, m in own.items() if isinstance(m, MemberDescriptorType))
    return _SLOTS[kind]


def kinds_of(value: Any) -> tuple[Callable[[Any, str], Kept], ...] | None:
    """How an object is kept: not at all, or by what it holds, by its attributes, or by both; ``None``: it cannot be."""
    if isinstance(value, SHARED):
        return ()
    if isinstance(value, Tensor):
        # A tensor with a graph is a result. Nobody writes into it, nor into one of inference mode in training.
        result = value.grad_fn is not None or (value.is_inference() and not torch.is_inference_mode_enabled())
        plain = not (result or value.is_meta or value.is_quantized)
        return (Numbers,) if plain else ()
    home = type(value).__module__.partition(".")[0]
    names = (Names,) if hasattr(value, "__dict__") and home not in LIBRARIES else ()
    if isinstance(value, (list, deque, dict, set)):
        return (Items, *names)
    for types, how in OTHERS:
        if isinstance(value, types):
            writable = not isinstance(value, np.ndarray) or value.flags.writeable
            return (*((partial(Kept, how=how),) if writable else ()), *names)
    if isinstance(value, nn.Module):
        return (Names,)
    if hasattr(value, "__next__") or home in SYSTEM:
        return None
    return (Names,) if names or (home not in LIBRARIES and _slots_of(type(value))) else ()


class _MetricNames(Names):
    """What a metric keeps beside states that can be joined."""

    def now(self) -> dict[str, Any]:
        return beside_states(self.value)


def means_the_same(kept: Kept) -> bool:
    """Whether attributes were only bound to other objects with the same contents, as caches are."""
    if not isinstance(kept, Names):
        return False
    bound, gone = kept.change()
    return not gone and all(is_equal(value, kept.content.get(name, kept)) for name, value in bound.items())


class _Bindings(Kept):
    """Which buffers or submodules the parts of a module have by which names; what is in them is kept by itself."""

    value: list[tuple[str, dict[str, Any]]]

    def now(self) -> list[dict[str, Any]]:
        return [dict(names) for _, names in self.value]

    def is_same(self) -> bool:
        return all(
            len(now) == len(then) and all(map(is_, map(now.get, then), then.values()))
            for (_, now), then in zip(self.value, self.content, strict=True)
        )

    def put(self, content: list[dict[str, Any]]) -> None:
        for (_, names), then in zip(self.value, content, strict=True):
            names.clear()
            names.update(then)

    def changed_names(self) -> list[str]:
        both = [(at, now, then) for (at, now), then in zip(self.value, self.content, strict=True)]
        return [at + n for at, now, then in both for n in {**then, **now} if now.get(n, self) is not then.get(n, self)]

    def parts(self) -> Iterable[tuple[Any, str]]:
        return ()
