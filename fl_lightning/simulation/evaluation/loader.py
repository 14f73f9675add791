# SPDX-License-Identifier: Apache-2.0
"""Evaluation batches of all clients in one loader, in client order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.training.local_options import limited


@dataclass(frozen=True)
class Cursor:
    """Where in the clients' data the last batch came from."""

    client_id: int
    is_first: bool
    is_last: bool
    num_samples: int


class EvaluationLoader:
    """Walks over all clients' batches in client order.

    One loader, not a list of them: a list would make Lightning demand a ``dataloader_idx`` argument and rename every
    metric.

    Args:
        loaders: the clients' evaluation data.
        limit: batches per client, a count or a fraction.
    """

    def __init__(self, loaders: ClientLoaders, limit: int | float) -> None:
        self.loaders = loaders
        self._counts = [limited(limit, loaders.num_batches(client)) for client in range(len(loaders))]
        self.cursor: Cursor | None = None

    def __len__(self) -> int:
        return sum(self._counts)

    def of_client(self, client_id: int) -> Iterator[tuple[Any, int]]:
        """The client's batches alone, with their numbers of samples."""
        return islice(self.loaders.batches(client_id, seed=None), self._counts[client_id])

    def __iter__(self) -> Iterator[Any]:
        for client, count in enumerate(self._counts):
            for index, (batch, size) in enumerate(self.of_client(client)):
                self.cursor = Cursor(client, index == 0, index + 1 == count, size)
                yield batch
