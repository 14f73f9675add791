# SPDX-License-Identifier: Apache-2.0
"""Options of parameter groups that a visit sets by hand, beside its schedulers: learning rates of a warm-up, say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fl_lightning.clients.client_optimizers import ClientOptimizers, group_options
from fl_lightning.lightning.module.contents import is_equal

HandSet = Sequence[Sequence[Mapping[str, Any]]]
"""For each optimizer and parameter group what was set, by name."""


class HandSetOptions:
    """Tells what a visit sets in parameter groups from what its schedulers set there."""

    def __init__(self, optimizers: ClientOptimizers) -> None:
        self._optimizers = optimizers
        self._known: list[list[dict[str, Any]]] = []
        self._names: list[list[set[str]]] = []  # of options that were set by hand, as ``_known``

    def begin(self) -> None:
        """A visit begins: what is there was not set by hand."""
        self.follow()
        self._names = [[set() for _ in groups] for groups in self._known]

    def note(self) -> None:
        """Looks for what was set since the last call of :meth:`follow`, before a scheduler steps."""
        for state, known, names in zip(self._optimizers.states, self._known, self._names, strict=True):
            for group, before, found in zip(state.optimizer.param_groups, known, names, strict=False):
                options = self._optimizers.settable(group)
                found.update(n for n in options if n not in before or not _same(group[n], before[n]))

    def follow(self) -> None:
        """A scheduler has stepped: what it set was not set by hand."""
        states = self._optimizers.states
        self._known = [[group_options(group) for group in state.optimizer.param_groups] for state in states]

    def end(self) -> HandSet:
        """What the visit leaves in options that were set by hand, if any was."""
        self.note()
        if not any(names for groups in self._names for names in groups):
            return ()
        states = zip(self._optimizers.states, self._names, strict=True)
        pairs = [zip(state.optimizer.param_groups, names, strict=False) for state, names in states]
        return [[group_options({name: group[name] for name in chosen}) for group, chosen in each] for each in pairs]

    def put(self, options: HandSet) -> None:
        """Sets options as a visit has set them."""
        for state, groups in zip(self._optimizers.states, options, strict=False):
            for group, chosen in zip(state.optimizer.param_groups, groups, strict=False):
                group.update(group_options(chosen))


def _same(one: Any, other: Any) -> bool:
    lists = isinstance(one, list) and isinstance(other, list)
    return is_equal(tuple(one), tuple(other)) if lists else is_equal(one, other)
