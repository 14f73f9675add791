# SPDX-License-Identifier: Apache-2.0
"""Lists that note whether they are used for anything but adding to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_READS = (
    "__len__", "__bool__", "__iter__", "__setitem__", "__delitem__", "__contains__", "__reversed__", "__add__",
    "__mul__", "__rmul__", "__imul__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__",
    "__reduce_ex__", "pop", "popleft", "insert", "appendleft", "extendleft", "remove", "sort", "reverse", "rotate",
    "copy", "index", "count",
)  # fmt: skip
"""``__bool__`` is there in a deque up to Python 3.10; later ones ask for the length."""


class Watched:
    """What both kinds of lists have; :meth:`empty` has to be called once before use.

    It begins with an item that nothing can be computed from: functions in C take the items of a list unasked.
    """

    _base: Any
    _read = False

    def empty(self) -> None:
        """Takes away what was added, and all that was noted."""
        self._base.clear(self)
        self._base.append(self, torch.Tensor._make_subclass(_Unreadable, torch.empty(())))
        self._read, _Unreadable.read = False, False

    @property
    def was_read(self) -> bool:
        """Whether somebody has looked into it, or taken something out."""
        return self._read or _Unreadable.read or type(next(self._items(), None)) is not _Unreadable

    def added(self) -> list[Any]:
        """What was added."""
        return list(self._items())[1:]

    def _items(self) -> Iterator[Any]:
        return iter(self._base.__iter__(self))

    def __getitem__(self, place: Any) -> Any:
        """From the end on it may give back what has been added, which others cannot have changed."""
        read = self._read or not (isinstance(place, int) and 0 < -place < self._base.__len__(self))
        try:
            return self._base.__getitem__(self, place)
        finally:
            self._read = read  # a deque has just asked for its length

    def __copy__(self) -> list[Any]:
        """For what puts things back; what others may have added still cannot be read."""
        return list(self._items())


class WatchedList(Watched, list[Any]):
    """A list."""

    _base = list
    __hash__ = None


class WatchedDeque(Watched, deque[Any]):  # type: ignore[misc]
    """A deque without a limit."""

    _base = deque
    __hash__ = None


def _noted(base: Any, name: str) -> Any:
    own = getattr(base, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._read = True
        return own(self, *args, **kwargs)

    return method


for _kind in (WatchedList, WatchedDeque):
    for _name in _READS:
        if hasattr(_kind._base, _name):
            setattr(_kind, _name, _noted(_kind._base, _name))


class _Unreadable(Tensor):
    """Stands for items that others may have added."""

    read = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        cls.read = True
        raise TypeError("items that other clients may have added to a list cannot be read in a worker process")
