# SPDX-License-Identifier: Apache-2.0
"""Where the module is in each client's evaluation, and where it is in the end, with what all clients have added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmetrics import Metric, MetricCollection

from fl_lightning.core.errors import ModuleError
from fl_lightning.core.modules import submodules
from fl_lightning.lightning.logged_values import ClientLogs, LoggedRow
from fl_lightning.lightning.metric_state import MetricDelta, last_value, updates_of
from fl_lightning.lightning.module.changes import read, written
from fl_lightning.lightning.module.contents import is_equal
from fl_lightning.lightning.module.objects import Added, Bound, Object
from fl_lightning.lightning.module.snapshot import ModuleSnapshot
from fl_lightning.lightning.names import LightningModule

Changes = Sequence[tuple[Object, Any]]


@dataclass
class ClientPart:
    """What one client's evaluation finds, and what its batches leave."""

    size: int = 0  # its samples
    row: LoggedRow = field(default_factory=LoggedRow)
    own: LoggedRow | None = None  # values of its own model, where the method has them
    logged: ClientLogs = field(default_factory=dict)  # by its batches of the present loader
    metrics: list[MetricDelta | None] = field(default_factory=list)  # None for those that it leaves alone
    changes: Mapping[str, Any] | Changes = ()  # of all else, in plain values if they can be
    changed: tuple[str, ...] = ()  # attributes that nothing can join


class ClientParts:
    """Lets every client's evaluation begin with the module as it is now and with empty metrics.

    ``travels``: what clients leave goes to other processes, which have copies of the module.
    """

    def __init__(self, module: LightningModule, travels: bool) -> None:
        self._module, self._travels = module, travels
        self._found = self._begun = ModuleSnapshot(module, whole=True)
        self._found.empty_metrics()
        if len(self._found.states) < len(self._found.metrics) and self._found.changed():  # those that nothing joins
            self._begun = ModuleSnapshot(module, whole=True)
        self._joined = [state.metric for state in self._found.states]
        self._collections = [part for _, part in submodules(module) if isinstance(part, MetricCollection)]
        inside = {id(part): (part, bool(at)) for one in self._found.metrics.values() for at, part in submodules(one)}
        self.metrics = [(part, is_inside) for part, is_inside in inside.values() if isinstance(part, Metric)]
        self._is_as_begun = True

    def enter(self, part: ClientPart) -> None:
        """The module is as a client has left it; new ones begin."""
        if not self._is_as_begun:
            self._begun.restore()
        for metric in self._joined if not part.metrics else ():
            metric.reset()
        for metric, delta in zip(self._joined, part.metrics, strict=False):
            metric.reset() if delta is None else delta.put_in(metric)
        for tracked, change in self._changes_of(part):
            tracked.apply(change)
        self._is_as_begun = False

    def leave(self, part: ClientPart) -> None:
        """Some batches of a client are over."""
        for collection in self._collections:  # metrics in it may have one state for several
            collection.values(copy_state=False)
        used = [updates_of(metric) or last_value(metric) is not None for metric in self._joined]
        part.metrics = [MetricDelta.of(m) if is_used else None for m, is_used in zip(self._joined, used, strict=True)]
        part.changes, part.changed, changed = (), (), self._begun.changed()
        self._is_as_begun = not changed
        if not changed:
            return
        changes = [(tracked, tracked.change()) for tracked in changed if not means_the_same(tracked)]
        names = [
            name for tracked, change in changes if not _only_grew(tracked, change) for name in tracked.changed_names()
        ]
        part.changed = tuple(dict.fromkeys(names))
        found = written(self._begun, [tracked for tracked, _ in changes], {})
        if found.lost and self._travels:
            raise ModuleError(
                f"what {type(self._module).__name__} leaves in attributes must be plain values where several processes "
                f"evaluate clients, found {'; '.join(f'{name} ({why})' for name, why in found.lost.items())}"
            )
        part.changes = changes if found.lost else found.plain

    def _changes_of(self, part: ClientPart) -> Iterable[tuple[Object, Any]]:
        if isinstance(part.changes, Mapping):
            return read(part.changes, self._begun, self._module.device).changes
        return part.changes

    def join(self, parts: Sequence[ClientPart], chosen: Iterable[ClientPart]) -> None:
        """The module is as it was found, with what clients have added to metrics and lists, in their order.

        Whatever else they have changed is as those who are chosen have left it.
        """
        self._found.put()
        for part in parts:
            for metric, delta in zip(self._joined, part.metrics, strict=True):
                if delta is not None:
                    delta.add_to(metric)
        changes = [(part, tracked, change) for part in parts for tracked, change in self._changes_of(part)]
        otherwise = {id(tracked) for _, tracked, change in changes if not _only_grew(tracked, change)}
        for part, tracked, change in changes:
            if id(tracked) not in otherwise or any(part is one for one in chosen):
                tracked.apply(change)


def _only_grew(tracked: Object, change: Any) -> bool:
    """Whether steps have added to the end of a list; one that keeps some items alone is no such list."""
    return isinstance(change, Added) and getattr(tracked.value, "maxlen", None) is None


def means_the_same(found: Object) -> bool:
    """Whether attributes were only bound to other objects with the same contents, as caches are."""
    change = found.change()
    if not isinstance(change, Bound) or change.gone:
        return False
    return all(is_equal(value, found.content.get(name, found)) for name, value in change.values.items())
