# SPDX-License-Identifier: Apache-2.0
"""Collects every client's metric values while one evaluation runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from typing import Any

import torch

from fl_lightning.core.lightning.evaluation_batches import ClientBatch
from fl_lightning.core.lightning.logged_values import ClientValues
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.simulation.evaluation.epoch_end import EpochEnd
from fl_lightning.simulation.evaluation.loader import EvaluationLoader
from fl_lightning.simulation.evaluation.personal import PersonalEvaluation


class ClientEvaluation:
    """Collects per-client values while an evaluation runs.

    Args:
        loader: the loader that is being walked.
        results: Lightning's result collection of the running evaluation.
        stage: ``"val"`` or ``"test"``.
        round: rounds finished.
        personal: evaluates clients' own models as well, where the method has them.
        ending: runs the module's epoch-end hook for each client, where it has one.
    """

    def __init__(
        self,
        loader: EvaluationLoader,
        results: Any,
        stage: str,
        round: int,  # noqa: A002
        personal: PersonalEvaluation | None = None,
        ending: EpochEnd | None = None,
    ) -> None:
        self._loader, self._stage, self._round, self._personal = loader, stage, round, personal
        self._ending = ending
        self._values = ClientValues(results)
        self._clients: list[int] = []
        self._sizes: list[int] = []
        self._rows: list[dict[str, float]] = []
        self._samples = 0

    @contextmanager
    def batch(self, batch: ClientBatch) -> Iterator[None]:
        """Around everything that Lightning does with a batch, its hooks included."""
        if batch.source is not self._loader:  # of several loaders, clients are those of the last
            yield
            return
        if batch.is_first:
            self._values.begin()
            if self._ending is not None:
                self._ending.begin()
            self._samples = 0
        yield
        self._samples += batch.num_samples
        if batch.is_last:
            self._end_client(batch.client_id)

    def _end_client(self, client: int) -> None:
        self._clients.append(client)
        self._sizes.append(self._samples)
        late = {} if self._ending is None else self._ending.values()
        row = {**late, **self._values.end()}
        if self._ending is not None:
            self._ending.end()
        if self._personal is not None:
            row |= self._personal.values(client, self._loader.of_client(client))
        self._rows.append(row)

    def record(self) -> EvaluationRecord:
        """What was collected; a metric that a client did not log is NaN for it."""
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        values = {n: torch.tensor([row.get(n, nan) for row in self._rows], dtype=torch.float64) for n in names}
        sizes = torch.tensor(self._sizes, dtype=torch.int64)
        return EvaluationRecord(self._round, self._stage, tuple(self._clients), sizes, values)
