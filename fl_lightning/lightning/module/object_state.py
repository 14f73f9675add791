# SPDX-License-Identifier: Apache-2.0
"""All that a module keeps beside parameters and buffers, as it was at a moment, to be put back and carried on.

It is found from the attributes of the module and its submodules on: containers, tensors, arrays, generators, and
objects of people's own with all that they hold. Whatever changed inside comes back inside, so that everybody who
holds an object sees the same.
"""

from __future__ import annotations

from collections import deque
from operator import is_
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.core.modules import named_metrics, outside_metrics, submodules
from fl_lightning.lightning.metric_state import beside_states, joins_clients
from fl_lightning.lightning.module.kept_objects import PLAIN, Items, Kept, Names, PartNames, held_by, kinds_of

_HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
_MANY = 100_000
"""Objects of one module that are looked after; what is found beyond these is left alone."""


class _MetricNames(PartNames):
    """What a metric keeps beside states that can be joined."""

    def now(self) -> dict[str, Any]:
        """See :meth:`Kept.now`."""
        return beside_states(self.value)

    def is_same(self) -> bool:
        """See :meth:`Kept.is_same`."""
        return Names.is_same(self)


class ObjectState:
    """What the plain attributes of a module and its submodules held when this was made.

    Parameters, buffers, submodules, the trainer, callbacks, data sets and metrics are not among them.

    Args:
        module: the module.

    Attributes:
        kept: every object that may change, in an order that is the same in copies of the module.
        metrics: metric objects by name, those that the module holds outside its submodules included.
        alone: attributes with objects that cannot be put back, iterators and open files for instance, and their kinds.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.kept: list[Kept] = []
        self.metrics: dict[str, Metric] = dict(named_metrics(module))
        self.alone: dict[str, str] = {}
        self._hooks: list[Items] = []  # of torch: many dictionaries, and hardly ever anything in them
        parts = submodules(module)
        self._structure = [(part, list(part._modules.values())) for _, part in parts]
        self.own: list[Any] = []
        for _, part in parts:
            self.own += [part, *part._parameters.values(), *part._buffers.values()]
        self._seen = set(map(id, self.own))
        waiting = deque[tuple[Any, str]]()
        for prefix, part in outside_metrics(parts):
            if not isinstance(part, MetricCollection):
                self._keep(PartNames(part, prefix), waiting)
        for prefix, metric in self.metrics.items():
            if joins_clients(metric):
                self._keep(_MetricNames(metric, prefix), waiting)
        while waiting:
            self._look_at(*waiting.popleft(), waiting)

    def _keep(self, kept: Kept, waiting: deque[tuple[Any, str]]) -> None:
        self.kept.append(kept)
        for value, name in kept.parts():
            if not isinstance(value, PLAIN):
                waiting.append((value, name))

    def _look_at(self, value: Any, name: str, waiting: deque[tuple[Any, str]]) -> None:
        if id(value) in self._seen or isinstance(value, PLAIN):
            return
        self._seen.add(id(value))
        if isinstance(value, dict) and not value and name.rpartition(".")[2] in _HOOKS:
            self._hooks.append(Items(value, name))
            return
        inside = held_by(value)
        if inside is not None:
            waiting.extend((part, name) for part in inside)
            return
        if isinstance(value, Metric):
            self.metrics[f"{len(self.metrics)} in {name}"] = value
            if joins_clients(value):
                self._keep(_MetricNames(value, name), waiting)
        kinds = kinds_of(value) if len(self.kept) < _MANY else None
        if kinds is None:
            self.alone.setdefault(name, type(value).__name__)
        for kind in kinds or ():
            self._keep(kind(value, name), waiting)

    @property
    def known(self) -> list[Any]:
        """All that copies of the module have at the same places: what belongs to it, and what is kept."""
        kept = [*self.kept, *self._hooks]
        return [*self.own, *self.metrics.values(), *kept, *(one.value for one in kept)]

    def is_current(self) -> bool:
        """Whether nothing has changed: the submodules are the same, and every object holds what it held."""
        same = all(
            len(part._modules) == len(children) and all(map(is_, part._modules.values(), children))
            for part, children in self._structure
        )
        return same and not self.changed()

    def changed(self) -> list[Kept]:
        """The objects that hold something else now."""
        hooks = [kept for kept in self._hooks if kept.value]
        return [*(kept for kept in self.kept if not kept.is_same()), *hooks]
