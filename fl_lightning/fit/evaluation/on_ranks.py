# SPDX-License-Identifier: Apache-2.0
"""An evaluation whose clients are divided among the processes of a fit.

Each process evaluates its clients and keeps what each of them adds: to what ``self.log`` collects, and to the module's
metrics. All that is exchanged, and joined in the order of clients, as one process does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torchmetrics import Metric

from fl_lightning.clients.visits import portable
from fl_lightning.fit.evaluation.one_client import top_metrics
from fl_lightning.lightning.inspection import averaging, users_callback
from fl_lightning.lightning.logged_values import ClientValues, LoggedShare
from fl_lightning.lightning.metric_state import MetricState, State, is_mergeable, read_state, write_state
from fl_lightning.lightning.module.logged_row import LoggedRow
from fl_lightning.lightning.names import Callback, LightningModule, Trainer
from fl_lightning.lightning.ranks import Ranks


@dataclass(frozen=True)
class ClientShare:
    """What one client adds to an evaluation.

    Attributes:
        size: its samples.
        row: its values.
        own: those of its own model, where the method has them.
        logged: what it adds to what ``self.log`` collects.
        metrics: what it adds to the module's metrics, and how often it has updated them.
    """

    size: int
    row: LoggedRow
    own: LoggedRow | None
    logged: LoggedShare
    metrics: list[tuple[State, int]]


class DividedEvaluation:
    """This process's part of an evaluation.

    Args:
        ranks: the processes.
        module: the module, before its first evaluation batch; metrics that hold anything then are not its evaluation's.
        values: what ``self.log`` collects.
    """

    def __init__(self, ranks: Ranks, module: LightningModule, values: ClientValues) -> None:
        self._ranks, self._values = ranks, values
        self._metrics: list[Metric] = [m for m in top_metrics(module) if is_mergeable(m) and not m._update_count]
        self._shares: dict[int, ClientShare] = {}

    def keep(self, client: int, size: int, row: LoggedRow) -> None:
        """Keeps what the client has added; called before that is joined with what others have."""
        metrics = [(read_state(metric), int(metric._update_count)) for metric in self._metrics]
        self._shares[client] = ClientShare(size, row, None, self._values.share(), metrics)

    def keep_own(self, client: int, own: LoggedRow) -> None:
        """Keeps the values of the client's own model."""
        self._shares[client] = replace(self._shares[client], own=own)

    def joined(self) -> dict[int, ClientShare]:
        """The shares of all clients in their order; logged values and metrics hold all of them."""
        for share in self._shares.values():
            if share.row.error is not None:
                share.row.error = portable(share.row.error)
        parts = self._ranks.gather(self._shares)
        shares = dict(sorted(pair for part in parts for pair in part.items()))
        self._values.join([share.logged for share in shares.values()])
        for metric, states in zip(self._metrics, zip(*(s.metrics for s in shares.values()), strict=True), strict=True):
            _join(metric, [(state, updates) for state, updates in states if updates])
        return shares


def _join(metric: Metric, states: Sequence[tuple[State, int]]) -> None:
    for place, (state, updates) in enumerate(states):
        before = MetricState(metric)
        write_state(metric, state, updates)
        if place:
            before.merge_back()


class LoggerWatch:
    """Notices whether evaluation steps write to loggers themselves: then rank 0 must see all of them.

    Attributes:
        touched: whether they do.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.touched = trainer, False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a step."""
        trainer, watched = self._trainer, _Watched(self._trainer.loggers)
        loggers = trainer.loggers
        trainer.loggers = watched
        try:
            yield
        finally:
            self.touched |= watched.touched
            trainer.loggers = loggers


class _Watched(list[Any]):
    touched = False

    def __getitem__(self, index: Any) -> Any:
        self.touched = True
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        self.touched = True
        return super().__iter__()


def batch_callback(trainer: Trainer, stage: str) -> str | None:
    """Whose hooks look at single evaluation batches, or change the model for an evaluation; ``None``: nobody's."""
    word = {"val": "validation", "test": "test"}[stage]
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found = users_callback(callbacks, f"on_{word}_batch_start", f"on_{word}_batch_end") or averaging(callbacks)
    return None if found is None else type(found).__name__
