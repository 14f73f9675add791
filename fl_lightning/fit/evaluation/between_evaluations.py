# SPDX-License-Identifier: Apache-2.0
"""What lasts from one evaluation to the next: what was said, and what a module remembers.

What it remembers belongs to all clients, and is no client's own value: ``self.best = max(self.best, accuracy)`` in an
epoch-end hook is the best value of the whole model so far, and a client's own best is nowhere. Such a value is told by
running what logs it twice: with what is remembered, and without it.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from fl_lightning.lightning.logged_values import LoggedRow
from fl_lightning.lightning.metric_state import updates_of
from fl_lightning.lightning.module.kept_objects import Kept, Names
from fl_lightning.lightning.module.whole_state import WholeState, is_equal
from fl_lightning.lightning.names import LightningModule, rank_zero_info, rank_zero_warn

_NOTHING = object()


class Memory:
    """Knows what earlier evaluations have left in a module."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # logged names that depend on it
        self.is_empty = True
        self._module: LightningModule | None = None
        self._left: list[tuple[Kept, str | None, Any]] = []
        self._first: dict[tuple[int, str | None], tuple[Kept, Any]] = {}

    def begin(self, module: LightningModule, start: WholeState) -> None:
        """An evaluation begins."""
        if self._module is not module:
            self._module, self._first, self.names = module, {}, set()
        changed = [(kept, name, first) for (_, name), (kept, first) in self._first.items()]
        self._left = [one for one in changed if _differs(*one)]
        self.is_empty = not (self._left or any(map(updates_of, start.metrics.values())))

    def end(self, start: WholeState, but: set[int]) -> None:
        """An evaluation is over.

        ``start`` is what the module held at its first batch, ``but`` the ids of buffers that a callback has lent it.
        """
        for kept in start.attributes:
            if kept.is_same() or id(kept.value) in but:
                continue
            names = {}
            if isinstance(kept, Names):
                bound, gone = kept.change()
                names = {name: kept.content.get(name, _NOTHING) for name in (*bound, *gone)}
            for name, first in names.items() if isinstance(kept, Names) else ((None, kept.content),):
                self._first.setdefault((id(kept.value), name), (kept, first))

    def forget(self) -> None:
        """Lets the module hold what it held before the first evaluation that has changed it; metrics apart."""
        for kept, name, first in self._left:
            if name is None:
                kept.put(first)
            else:
                kept.apply(({}, [name]) if first is _NOTHING else ({name: first}, []))

    def compare(self, one: LoggedRow, other: LoggedRow) -> None:
        """Notes what differs."""
        for name in {**one.values, **other.values}:
            if repr(one.values.get(name)) != repr(other.values.get(name)):  # NaN equals NaN here
                self.names.add(name)


def _differs(kept: Kept, name: str | None, first: Any) -> bool:
    if name is None:
        return not kept.is_same()
    now = kept.now().get(name, _NOTHING)
    return now is not first and not is_equal(now, first)


class Notices:
    """What all evaluations of a strategy have in common: what was said, and what they have left in the module."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.divisible: dict[str, ref[LightningModule]] = {}  # among processes, by stage
        self._said: set[str] = set()

    def warn(self, text: str) -> None:
        """Warns once."""
        if text not in self._said:
            self._said.add(text)
            rank_zero_warn(text)

    def inform(self, text: str) -> None:
        """Says it once."""
        if text not in self._said:
            self._said.add(text)
            rank_zero_info(text)
