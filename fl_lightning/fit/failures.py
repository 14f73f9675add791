# SPDX-License-Identifier: Apache-2.0
"""What becomes of clients and rounds that come to nothing: they are left out and counted, or the fit ends."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch

from fl_lightning.arguments import trusted
from fl_lightning.clients.upload import Upload
from fl_lightning.core.errors import ClientError, ModuleError
from fl_lightning.core.records import RoundRecord, client_label, numbered
from fl_lightning.fit.options import FitOptions
from fl_lightning.fit.uploads import Round, UsableUploads
from fl_lightning.lightning.names import rank_zero_warn

_NAMED = 3  # clients in a message about a round


class Failures:
    """Follows ``on_client_error`` and ``max_failed_rounds``.

    ``skipped_rounds`` changed nothing. ``failed_rounds`` are those in a row, up to the last one, in which clients
    trained and nothing came of it: no upload was usable, or the step was refused.
    """

    def __init__(self, options: FitOptions, num_clients: int) -> None:
        self._options = options
        self.skipped_rounds, self.failed_rounds = 0, 0
        self.names: Sequence[str] = numbered(num_clients)

    def drop(
        self, current: Round, client_id: int, reason: str, cause: Exception | None = None, others: bool = True
    ) -> None:
        """Leaves a client out of the round with a warning, or raises, by policy; a fault of the module raises."""
        label = client_label(client_id, self.names)
        at_fault = isinstance(cause, ModuleError)
        if at_fault or self._options.on_client_error == "raise":
            succeeded = cause is None or bool(current.uploads) or current.index > 0
            hint = "no client has succeeded, so look at the module, its learning rate and the data"
            hint = "on_client_error='drop' leaves such clients out" if others and succeeded else hint
            hint = "it is the module's fault" if at_fault else hint
            raise ClientError(f"client {label} in round {current.index}: {reason} ({hint})") from cause
        current.dropped[client_id] = reason
        rank_zero_warn(f"client {label} is left out of round {current.index}: {reason}")

    def refused(self, current: Round, reports: UsableUploads, flaw: str) -> RoundRecord:
        """The record of a round whose step was refused, or an error, by policy."""
        largest = reports.norms.sort(descending=True, stable=True).indices[:_NAMED].tolist()
        labels = [client_label(reports.uploads[place].client_id, self.names) for place in largest]
        norms = ", ".join(f"client {who} {float(reports.norms[k]):.3g}" for who, k in zip(labels, largest, strict=True))
        words = f"{flaw}; the largest norms of updates are {norms}"
        if self._options.on_client_error == "raise":
            raise ClientError(
                f"round {current.index}: {words}. The model stays as it was before the round "
                "(on_client_error='drop' goes on with the next one)"
            )
        return self.skipped(current, reports.uploads, f"was left out: {words}", flaw, failed=True)

    def skipped(self, current: Round, uploads: Sequence[Upload], event: str, reason: str, failed: bool) -> RoundRecord:
        """The record of a round that does not count, or an error after too many; what did arrive is left out."""
        self.skipped_rounds += 1
        self.failed_rounds = self.failed_rounds + 1 if failed else 0 if uploads else self.failed_rounds
        others = {u.client_id: f"the round had {reason}" for u in uploads if u.client_id not in current.dropped}
        dropped = {**current.dropped, **others}
        if failed and self.failed_rounds == self._options.max_failed_rounds:
            some = list(dropped.items())[:_NAMED]
            causes = "; ".join(f"client {client_label(client, self.names)}: {why}" for client, why in some)
            number = f"{self.failed_rounds} round{'s' * (self.failed_rounds > 1)} in a row"
            raise ClientError(
                f"{number} changed nothing although clients trained, up to round {current.index}, which {event} "
                f"({causes}). The model is that of the last round that counted; max_failed_rounds="
                f"{self._options.max_failed_rounds} of FederatedStrategy stops the fit here, None never does"
            )
        rank_zero_warn(f"round {current.index} {event}: the global model is unchanged")
        return trusted(RoundRecord)(
            current.index, (), dropped, nan, None, 0.0, torch.zeros(0), 0, {}, True, None, {}, current.seconds, reason,
            self.skipped_rounds,
        )  # fmt: skip
