# SPDX-License-Identifier: Apache-2.0
"""Batches of all clients in one loader, in client order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

from fl_lightning.clients.client_batches import limited
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.fit.round_loader import LoaderOfAll
from fl_lightning.lightning.batches import ClientBatch


class PredictionLoader(LoaderOfAll):
    """Walks over all clients' batches in client order.

    One loader, not a list of them: a list would make Lightning demand a ``dataloader_idx`` argument and rename every
    metric.
    """

    def __init__(self, loaders: ClientLoaders, limit: int | float) -> None:
        super().__init__(loaders)
        self.share: Sequence[int] | None = None  # clients of this process; None: all
        self.counts = [limited(limit, loaders.num_batches(client)) for client in range(len(loaders))]

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def last_client(self) -> int:
        """The last client that has a batch here; -1 if there is none."""
        return max((client for client in self._walked() if self.counts[client]), default=-1)

    def _walked(self) -> Sequence[int]:
        return range(len(self.counts)) if self.share is None else self.share

    @property
    def num_evaluated(self) -> int:
        """How many clients have a batch."""
        return sum(count > 0 for count in self.counts)

    def of_client(self, client_id: int) -> Iterator[tuple[Any, int]]:
        """The client's batches alone, with their numbers of samples."""
        return islice(self.loaders.batches(client_id, seed=None), self.counts[client_id])

    def __iter__(self) -> Iterator[Any]:
        for client in self._walked():
            for batch, _ in self.of_client(client):
                yield batch


class EvaluationLoader(PredictionLoader):
    """Walks over all clients' batches and says of each one whose it is."""

    def __iter__(self) -> Iterator[ClientBatch]:
        starts = [0, *accumulate(self.counts)]
        for client in self._walked():
            count = self.counts[client]
            for index, (batch, size) in enumerate(self.of_client(client)):
                place = None if self.share is None else starts[client] + index
                yield ClientBatch(client, index == 0, index + 1 == count, size, batch, self, place)


class OwnBatches(NamedTuple):
    """A client's batches of one loader, with their numbers of samples."""

    batches: Iterable[tuple[Any, int]]
    number: int
    loader: int | None = None  # its number, as steps are told; None: there is one


def own_batches(loaders: Sequence[EvaluationLoader | None], client_id: int) -> list[OwnBatches]:
    """What a client has of each loader; nothing of those that are ``None`` or do not know it."""
    found = []
    for place, one in enumerate(loaders):
        told = place if len(loaders) > 1 else None
        if one is None or client_id >= len(one.counts):
            found.append(OwnBatches((), 0, told))
        else:
            found.append(OwnBatches(one.of_client(client_id), one.counts[client_id], told))
    return found
