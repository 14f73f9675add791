# SPDX-License-Identifier: Apache-2.0
"""What clients add to the module's metrics and lists where they train, and how it gets into the fit in their turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchmetrics import MetricCollection

from fl_lightning.core.lightning.metric_recorder import MetricRecorder, MetricUpdate
from fl_lightning.core.lightning.metric_state import MetricState
from fl_lightning.core.list_names import ListName, find_list, grown_lists, lists_in, made_list, put_list, watch_list
from fl_lightning.core.modules import named_metrics, submodules
from fl_lightning.core.watched_list import Watched


@dataclass(frozen=True)
class Gathered:
    """What one client has added.

    Attributes:
        updates: to metrics, in their order.
        values: what metrics gave for their last batch, by name.
        items: to lists.
    """

    updates: list[MetricUpdate] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    items: list[tuple[ListName, list[Any]]] = field(default_factory=list)

    def add_to(self, module: nn.Module) -> None:
        """Adds it to the module's own metrics and lists, with the bits that training here would have given.

        Raises:
            RuntimeError: the module has lost a list.
        """
        metrics = dict(named_metrics(module)) if self.updates or self.values else {}
        for update in self.updates:
            update.repeat(metrics[update.name])
        for name, value in self.values.items():
            metrics[name]._forward_cache = value
        for place, items in self.items:
            gathering = made_list(module, place)
            if gathering is None:
                raise RuntimeError(f"clients of this round add to list {place}, which the module no longer has")
            gathering.extend(items)


_GROUPS = ("_enable_compute_groups", "_groups_checked", "_groups")


class Gathering:
    """Notes what clients add to metrics and lists of a module, whose metrics and lists are empty until :meth:`undo`.

    Lists are not watched before it is known that clients add to them: others, such as settings, may be read.

    Args:
        module: the module of the fit, or a copy of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # In the module: what runs there without a trace takes back its entries, as it does with all lists.
        self._journal: list[MetricUpdate] = []
        vars(module)["_federated_journal"] = self._journal
        self._collections: list[tuple[MetricCollection, dict[str, Any]]] = []
        for _, part in submodules(module):
            if isinstance(part, MetricCollection):  # each metric has its own entries
                self._collections.append((part, {name: getattr(part, name) for name in _GROUPS}))
                part._enable_compute_groups, part._groups_checked = False, False
                part._groups = {place: [str(name)] for place, name in enumerate(part.keys(keep_base=True))}
        metrics = [(name, metric) for name, metric in named_metrics(module) if MetricRecorder.can_record(metric)]
        self._states = [MetricState(metric) for _, metric in metrics]  # of all, before the first is emptied
        self._metrics = {name: MetricRecorder(name, metric, self._journal) for name, metric in metrics}
        self._watched: dict[ListName, Watched] = {}
        self._originals: dict[ListName, Any] = {}
        self._lengths = {name: len(items) for name, items in lists_in(module).items()}

    @property
    def apart(self) -> list[object]:
        """Objects whose changes are noted here."""
        return [self._journal, *self._watched.values()]

    def watch(self, names: Iterable[ListName]) -> bool:
        """Watches these lists too; returns whether any of them was not watched before."""
        names = [name for name in names if name not in self._watched]
        self._originals |= {name: find_list(self._module, name) for name in names}
        found = {name: watch_list(self._module, name) for name in names}
        new = {name: watched for name, watched in found.items() if watched is not None}
        self._watched |= new
        return bool(new)

    def end(self) -> tuple[Gathered, str]:
        """Takes what was added since the last call, and leaves the copy as it was before.

        Returns:
            What was added, and what was read that others may have added to, in words.
        """
        reads = [metric.doubt for metric in self._metrics.values() if metric.doubt]
        values = {name: metric.end() for name, metric in self._metrics.items()}
        values = {name: value for name, value in values.items() if value is not None}
        updates = list(self._journal)
        self._journal.clear()
        reads += [f"reads list '{name}', which it adds to" for name, items in self._watched.items() if items.was_read]
        added = [(name, items.added()) for name, items in self._watched.items()]
        for watched in self._watched.values():
            watched.empty()
        return Gathered(updates, values, [(name, items) for name, items in added if items]), (reads or [""])[0]

    def cut(self) -> tuple[ListName, ...]:
        """Takes back what was added to lists that are not watched; returns which these are."""
        return tuple(grown_lists(self._module, self._lengths))

    def undo(self) -> None:
        """The module's metrics and lists are what they were, and hold what they held."""
        for name, items in self._originals.items():
            put_list(self._module, name, items)
        for metric in self._metrics.values():
            metric.undo()
        for state in self._states:
            state.put_back()
        for collection, groups in self._collections:
            vars(collection).update(groups)
        del vars(self._module)["_federated_journal"]
