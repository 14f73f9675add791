# SPDX-License-Identifier: Apache-2.0
"""What FedFV, FedMDFG and FedLF share: the last rows of clients, which count while these are absent."""

from __future__ import annotations

import math
from math import isqrt

from torch import Tensor

from fl_lightning.algorithms._shared.rows import JointRows
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Federation, Reads
from fl_lightning.arguments import check_unused
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.declared import row_history
from fl_lightning.core.storage.row_history import RowHistory

HISTORY_LIMIT = 8 * 2**30
"""Bytes of rows and products that a rule takes without being told how many rows to remember."""


class RemembersRows(ServerRule):
    """A server rule that remembers clients' rows for ``window`` rounds (``None``: all); ``history`` has them.

    At most ``max_history`` are remembered, oldest dropped first; ``None``: one for every client seen, if that is no
    more than 8 GiB. They live on ``history_device``; ``None``: beside the updates.
    """

    history = row_history(capacity="max_history", reserve="reserved_rows", device="history_device")

    def __init__(self, window: int | None, max_history: int | None = None, history_device: str | None = None) -> None:
        if window == 0:
            for name, value in (("max_history", max_history), ("history_device", history_device)):
                check_unused(f"{name} of {type(self).__name__}", value, None, "where no rows are remembered")
        self.window, self.max_history, self.history_device = window, max_history, history_device
        self.reserved_rows = 0  # at most, in this fit

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        """Inner products, and rows where some are kept for rounds in which their clients are absent."""
        return "gram" if self.window == 0 else "rows"

    def begin_fit(self, federation: Federation) -> None:
        """Plans no more rows than there are clients, and than rounds bring."""
        layers = federation.layout.num_layers
        clients = len({*range(federation.num_clients), *self.history.select()})  # some may be gone
        cohort, most = federation.cohort_size, self.max_history or clients
        rounds = [each for each in (self.window, federation.rounds) if each is not None]
        rows = min([clients, *(each * (cohort or clients) for each in rounds)])
        size = RowHistory.max_nbytes(rows, federation.numel, layers, federation.dtype)
        if self.max_history is None and rows > (cohort or 0) and size > HISTORY_LIMIT:
            name, fitting = type(self).__name__, _fitting(federation.numel * federation.dtype.itemsize, layers)
            raise ValueError(
                f"{name}(max_history=None) would remember the rows of {rows:,} clients of {clients:,} and their "
                f"products, up to {size:,} B, more than the 8 GiB that it takes unasked: write "
                f"{name}(max_history={fitting}), which fits, or max_history={rows} for all of them"
            )
        self.history.capacity, self.history.reserve = min(most, clients), min(most, rows)
        self.reserved_rows = self.history.reserve

    def joint_rows(self, cohort: Cohort, since: float | None = None) -> JointRows:
        """The round's rows, followed by those of absent clients that were last online in round ``since`` or later."""
        absent = self.history.select(exclude=set(cohort.client_ids), since=since)
        absent = [client for client in absent if client < (cohort.num_clients or math.inf)]
        return JointRows(cohort, type(self).__name__, self.history, absent)

    def remember(self, cohort: Cohort, scales: Tensor | float = 1.0, live: Tensor | None = None) -> None:
        """Keeps the round's rows, once its step has been computed, and drops rows that are past the window.

        Args:
            cohort: the round's clients.
            scales: ``[m]`` or a number: factors of the rows from now on.
            live: ``[m]`` clients whose rows to keep; ``None``: all.
        """
        if self.window == 0:
            return
        if self.window is not None:
            self.history.forget(before=cohort.round + 1 - self.window)
        places = range(len(cohort)) if live is None else live.nonzero().flatten().tolist()
        clients = {place: cohort.client_ids[place] for place in places}
        self.history.remember(cohort.updates, clients, cohort.round, scales)


def _fitting(row: int, layers: int) -> int:
    """How many rows of ``row`` bytes fit into the limit with products of ``8 layers`` bytes a pair, to two digits."""
    pair = 8 * layers
    number = (isqrt(row * row + 4 * pair * HISTORY_LIMIT) - row) // (2 * pair)
    digits = int(10 ** max(len(str(number)) - 2, 0))
    return max(number // digits * digits, 1)
