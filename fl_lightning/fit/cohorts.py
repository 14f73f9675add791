# SPDX-License-Identifier: Apache-2.0
"""Cohorts, as server rules see them, of what clients have sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.records import mean_rate
from fl_lightning.arguments import trusted
from fl_lightning.clients.update_rows import UpdateRows
from fl_lightning.core.cohort import Cohort
from fl_lightning.fit.uploads import Round, UsableUploads, stacked


class Cohorts:
    """Makes cohorts of uploads.

    Args:
        rows: the rows of a round.
        theta: ``[n]`` the global parameters.
        rule: the client rule.
        num_clients: registered clients.

    Attributes:
        num_samples: training samples of all registered clients, if they are known.
    """

    def __init__(self, rows: UpdateRows, theta: Tensor, rule: ClientRule, num_clients: int) -> None:
        self._rows, self._theta, self._rule, self._num_clients = rows, theta, rule, num_clients
        self.num_samples: int | None = None

    def of(self, current: Round, reports: UsableUploads, places: Sequence[int], norms: Tensor | None) -> Cohort:
        """The cohort of some uploads, whose updates move to the front of the rows.

        Raises:
            ValueError: clients have sent other things beside their updates than others.
        """
        uploads, rows, columns = reports.uploads, self._rows, self._rows.columns
        ids = tuple(upload.client_id for upload in uploads)
        names = rows.same_companions(dict(zip(places, ids, strict=True)))
        updates, asks = rows.gathered(places, norms), current.asks
        rates = [upload.client_lr for upload in uploads if upload.client_lr is not None]
        losses = [upload.loss for upload in uploads if upload.loss is not None]
        what = f"extras of {type(self._rule).__name__}"
        return trusted(Cohort)(
            params=columns.part(self._theta),
            updates=updates,
            losses=torch.tensor(losses, dtype=torch.float64) if len(losses) == len(uploads) else None,
            sizes=torch.tensor([upload.size for upload in uploads]),
            client_ids=ids,
            round=current.index,
            client_lr=trusted(mean_rate)(rates) if len(rates) == len(uploads) else None,
            num_clients=self._num_clients,
            extras=stacked([upload.report.extras for upload in uploads], ids, what),
            companions={name: updates.beside(rows.companion(name)[: len(uploads)]) for name in names},
            losses_at=None if asks is None else (lambda params: asks(columns.joined(params), ids)),
            num_samples=self.num_samples,
        )
