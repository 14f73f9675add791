# SPDX-License-Identifier: Apache-2.0
"""Each client's values of what a module computes only when an evaluation ends.

Many projects update metrics, or append to a list, in ``validation_step`` and log in ``on_validation_epoch_end``. That
hook is run once more for every client, with what this client's batches have left behind and nothing else, and with
nobody listening but the client's row.
"""

from __future__ import annotations

from fl_lightning.fit.evaluation.one_client import Alone, top_metrics
from fl_lightning.lightning.metric_state import MetricState, is_mergeable
from fl_lightning.lightning.module.logged_row import LoggedRow
from fl_lightning.lightning.module.module_state import ModuleState, refill, state_kept
from fl_lightning.lightning.module.state_copy import StateCopy
from fl_lightning.lightning.names import LightningModule


class EpochEnd:
    """Runs the module's epoch-end hook for one client at a time, on copies of what it holds.

    Args:
        alone: runs the hook.
        lengths: of the lists that steps fill: what they held before the first client, by their ids.
        known: what a small :class:`StateCopy` does not take; grows.
    """

    def __init__(self, alone: Alone, lengths: dict[int, int], known: set[tuple[str, int]]) -> None:
        self._alone, self._start, self._known = alone, lengths, known
        self._module: LightningModule = alone.module
        self._metrics = top_metrics(self._module)
        self._lengths: dict[int, int] = {}
        self.aside: dict[int, MetricState] = {}

    def begin(self) -> None:
        """Called before a client's first batch: what was gathered so far is put aside."""
        states = [(m, MetricState(m)) for m in self._metrics if m._update_count > 0 and is_mergeable(m)]
        self.aside = {id(metric): state for metric, state in states}
        for _, state in states:
            state.reset()
        self._lengths = {id(items): len(items) for items in ModuleState(self._module).sequences()}

    def row(self, steps: LoggedRow) -> LoggedRow:
        """Called after a client's last batch: what the hook logs about this client alone.

        Args:
            steps: what the client's steps have logged.

        Returns:
            What the hook logs until it ends or raises; then the row holds the error.
        """
        with state_kept(self._module) as state:
            for items in state.sequences():
                before, start = self._lengths.get(id(items), 0), self._start.get(id(items), 0)
                if before > start:
                    refill(items, [*list(items)[:start], *list(items)[before:]])
            return self._alone.end(StateCopy(self._module, metrics=False, small=True, known=self._known), steps)

    def end(self) -> None:
        """Joins what was put aside with what has been gathered since."""
        for metric in self._metrics:
            state = self.aside.get(id(metric))
            if state is not None:
                state.merge_back() if metric._update_count > 0 else state.put_back()
        self.aside = {}
