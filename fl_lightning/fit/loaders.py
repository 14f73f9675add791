# SPDX-License-Identifier: Apache-2.0
"""The loaders that Lightning iterates over: the places of a round, and the batches of all clients in client order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, NoReturn

from torch.utils.data import Dataset

from fl_lightning.clients.client_batches import ClientBatches, LocalOptions, limited
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.data.visit_loader import VisitLoader
from fl_lightning.lightning.batches import ClientBatch, ClientTask
from fl_lightning.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.lightning.inspection import accumulation
from fl_lightning.lightning.names import Trainer


class LoaderOfAll:
    """Stands before Lightning for the loaders of all clients."""

    def __init__(self, loaders: ClientLoaders) -> None:
        self.loaders = loaders

    @property
    def dataset(self) -> Dataset[Any]:
        """The data of all clients, for whoever asks the trainer's loader for it."""
        return self.loaders.dataset

    @property
    def batch_size(self) -> int:
        """Samples of a client's batch."""
        return self.loaders.batch_size


class RoundLoader(LoaderOfAll):
    """What the epoch loop iterates over: the places of a round, each taken by a client or empty.

    ``shown`` is what others see in its place as ``trainer.train_dataloader``.
    """

    def __init__(self, size: int, loaders: ClientLoaders, loop: FederatedEpochLoop) -> None:
        super().__init__(loaders)
        self._size, self._loop = size, loop
        self.shown = VisitLoader(loaders, loop.host.visit_batches)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[ClientTask]:
        yield from self._loop.conductor.open_round()


def local_batches(trainer: Trainer, options: LocalOptions, limit: int | float, loaders: ClientLoaders) -> ClientBatches:
    """The clients' batches, which decide how long a visit is."""
    return ClientBatches(loaders, options, limit, accumulation(trainer), trainer.lightning_module)


class PredictionLoader(LoaderOfAll):
    """Walks over all clients' batches in client order.

    One loader, not a list of them: a list would make Lightning demand a ``dataloader_idx`` argument and rename every
    metric.
    """

    def __init__(self, loaders: ClientLoaders, limit: int | float) -> None:
        super().__init__(loaders)
        self.own_clients: Sequence[int] | None = None  # clients of this process; None: all
        self.counts = [limited(limit, loaders.num_batches(client)) for client in range(len(loaders))]

    def __len__(self) -> int:
        return sum(self.counts)

    def _walked(self) -> Sequence[int]:
        return range(len(self.counts)) if self.own_clients is None else self.own_clients

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
            for index, (batch, size) in enumerate(self.of_client(client)):
                place = None if self.own_clients is None else starts[client] + index
                yield ClientBatch(client, index, size, batch, self, place)


def counts_of(loaders: Sequence[EvaluationLoader | None], client_id: int) -> list[int]:
    """How many batches a client has of each loader; none of those that are ``None`` or do not know it."""
    return [0 if one is None or client_id >= len(one.counts) else one.counts[client_id] for one in loaders]


def refuse_undivided_data(loader: object) -> NoReturn:
    """Raises TypeError for training data that is not divided among clients."""
    raise TypeError(
        "FederatedStrategy trains on clients: wrap the data, "
        "data = fl.FederatedDataModule(my_datamodule, fl.data.Dirichlet(num_clients=100, alpha=0.1)), "
        "where my_datamodule may also be a DataLoader or the module that has train_dataloader, "
        "and call trainer.fit(model, data). Where a library calls trainer.fit itself, pass "
        f"FederatedStrategy(partition=fl.data.Dirichlet(num_clients=100, alpha=0.1)); found a {type(loader).__name__}"
    )
