# SPDX-License-Identifier: Apache-2.0
"""What a visit sees of the module beside parameters and buffers, and what becomes of what it leaves there.

Every visit of a round begins with the attributes as the round found them and with empty metrics. What it leaves is
written as plain values, wherever it happens, and joined after the round, in the order of the cohort.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from fl_lightning.core.errors import ModuleError
from fl_lightning.core.modules import preserve_modes, shadowed, submodules
from fl_lightning.lightning.metric_state import MetricDelta, MetricState
from fl_lightning.lightning.module.changes import Change, merge, read, written
from fl_lightning.lightning.module.objects import Constant, Object
from fl_lightning.lightning.module.plain_values import NO_LIMITS, Limits
from fl_lightning.lightning.module.snapshot import ModuleSnapshot
from fl_lightning.lightning.names import rank_zero_warn


class ModuleIsolation:
    """Lets every visit begin with the module as the round found it."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self.warned = module, set[str]()  # of what, in earlier visits
        self._snapshot: ModuleSnapshot | None = None
        self._metric_states: dict[str, tuple[Metric, MetricState]] = {}
        self._in_visit = self._pinned = False
        self._changed: list[Object] | None = None

    def take_snapshot(self) -> ModuleSnapshot:
        """Takes the module as it is now for what visits begin with, unless that is what they begin with already."""
        self._snapshot = ModuleSnapshot(self._module) if self._snapshot is None else self._snapshot.current()
        return self._snapshot

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Every visit begins with the module as it is now; nobody else changes it meanwhile."""
        self.take_snapshot()
        self._pinned = True
        try:
            yield
        finally:
            self._pinned = False

    @property
    def snapshot(self) -> ModuleSnapshot:
        """The module as it was when it was last looked at."""
        assert self._snapshot is not None
        return self._snapshot

    def unfollowed(self) -> list[str]:
        """What runs on from client to client in this process, as a sentence each: iterators, open files."""
        found = self.take_snapshot().unfollowed.items()
        return [f"attribute {name!r} ({kind}) cannot be put back after a client" for name, kind in found]

    def not_joined(self) -> list[str]:
        """Metrics that hold what one client has left, as a sentence each."""
        found = [
            (name, metric) for name, metric in self.take_snapshot().metrics.items() if name not in self.snapshot.joined
        ]
        return [f"metric {n!r} ({type(m).__name__}) holds what the client with most samples has left" for n, m in found]

    def changed(self) -> list[str]:
        """Attributes that hold something else than when they were last looked at."""
        return sorted({name for found in self.snapshot.changed() for name in found.changed_names()})

    # ---- a visit

    def begin(self) -> None:
        """A client is about to train."""
        if not self._pinned:
            self.take_snapshot()
        self._in_visit, self._changed = True, None
        for _, tensor in self.snapshot.tensors:
            if tensor.is_leaf and tensor.requires_grad:
                tensor.grad = None  # of another client, for an optimizer of the module's own
        self._metric_states = {name: (metric, MetricState(metric)) for name, metric in self.snapshot.joined.items()}
        for metric, _ in self._metric_states.values():  # of all, before the first is emptied: some may share states
            metric.reset()

    def end(self, limits: Limits = NO_LIMITS, attributes: Collection[str] | None = None) -> Change:
        """What the visit leaves, as :func:`written` says it; :meth:`restore` has to follow.

        Raises:
            ModuleError: it has changed which submodules or hooks there are, or a data set.
        """
        changed = self.snapshot.changed()
        if self.snapshot.structure in changed:
            raise ModuleError(_REFUSED.format(", ".join(map(repr, self.snapshot.structure.changed_names()))))
        self._refuse_changed_data(changed)
        deltas = {name: MetricDelta.of(metric) for name, (metric, _) in self._metric_states.items()}
        deltas = {name: delta for name, delta in deltas.items() if delta.updates}
        self._changed = changed
        return written(self.snapshot, changed, deltas, limits, attributes) if changed or deltas else Change()

    def _refuse_changed_data(self, changed: Sequence[Object]) -> None:
        for found in changed:
            if isinstance(found, Constant):
                found.restore()  # raises

    def restore(self) -> None:
        """Ends a visit, however it went: the module is as it was before."""
        if not self._in_visit:
            return
        for found in self.snapshot.changed() if self._changed is None else self._changed:
            if not isinstance(found, Constant):
                found.restore()
        for _, before in self._metric_states.values():
            before.restore()
        self._in_visit, self._metric_states = False, {}

    @contextmanager
    def unseen(self, evaluate: bool = True) -> Iterator[None]:
        """Runs the module without a trace in its attributes and metrics, and without a word to its loggers."""
        module = self._module
        self.begin()
        try:
            with shadowed(module, log=_ignore, log_dict=_ignore), preserve_modes(submodules(module)):
                if evaluate:
                    module.eval()
                yield
            self._changed = self.snapshot.changed()
            self._refuse_changed_data(self._changed)
        finally:
            self.restore()

    # ---- the round

    def merge(self, visits: Sequence[Change], chosen: Change | None) -> None:
        """Joins what visits have left, in cohort order; attributes are those of the visit ``chosen``, if any."""
        device = next((parameter.device for parameter in self._module.parameters()), torch.device("cpu"))
        found = [(visit, read(visit.plain, self.snapshot, device)) for visit in visits if visit.plain]
        merge([one for _, one in found], next((one for visit, one in found if visit is chosen), None))
        lost = {name: why for visit in visits for name, why in visit.lost.items() if name not in self.warned}
        if lost:
            self.warned.update(lost)
            rank_zero_warn(
                f"what clients leave in {type(self._module).__name__} must be plain values, tensors and containers of "
                f"them; these attributes are put back after every client: "
                f"{'; '.join(f'{name} ({why})' for name, why in lost.items())}"
            )


_REFUSED = (
    "local training must not add, replace or remove submodules or hooks, because no other client would have them, "
    "found changes in {}: make them in the module's __init__, setup or on_fit_start, let an attribute say which one a "
    "step uses, and remove hooks in the step that registers them"
)


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None
