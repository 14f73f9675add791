# SPDX-License-Identifier: Apache-2.0
"""What Lightning iterates over: the places of a round, all clients' batches; and how undivided data get there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, islice
from typing import Any, NoReturn

from torch import Tensor
from torch.utils.data import Dataset

from fl_lightning.arguments import shown
from fl_lightning.clients.client_batches import ClientBatches, LocalOptions
from fl_lightning.data.client_loaders import ClientLoaders, VisitLoader, limited
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.partitions import Partition
from fl_lightning.data.sources import StageLoaders, is_module
from fl_lightning.lightning.batches import ClientBatch, ClientTask
from fl_lightning.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.lightning.inspection import accumulation, is_overridden
from fl_lightning.lightning.names import LightningDataModule, Trainer, TrainerFn, rank_zero_warn
from fl_lightning.lightning.single_device import data_owners, data_replaced

PartitionLike = Partition | Sequence[Tensor] | Sequence[Sequence[int]] | Callable[[Any], FederatedDataModule]
"""How to divide, or a function that makes the federated data from the data of a Trainer."""


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


class AttachedData:
    """Puts a :class:`FederatedDataModule` in the place of what ``trainer.fit``, ``validate`` or ``test`` was given.

    ``seed`` decides the division, unless ``partition`` makes the federated data itself. Without ``partition`` all data
    stay as they are.
    """

    def __init__(self, partition: PartitionLike | None, seed: int) -> None:
        kinds = (Partition, Sequence, Callable, type(None))
        if isinstance(partition, (str, type)) or not isinstance(partition, kinds):  # type: ignore[arg-type]
            raise TypeError(
                "partition must be a Partition such as fl.data.Dirichlet(num_clients=100, alpha=0.1), index vectors, "
                "or a function of the data such as functools.partial(fl.FederatedDataModule, partition=..., "
                f"holdout=0.2), found {shown(partition)}"
            )
        if isinstance(partition, Sequence) and len(partition) == 0:
            raise ValueError(f"partition must hold the index vector of one client or more, found {partition!r}")
        self._make: Callable[[Any], FederatedDataModule] | None = None
        if isinstance(partition, (Partition, Sequence)):
            self._make = partial(FederatedDataModule, partition=partition, seed=seed)
        elif partition is not None:
            self._make = partition
        self.data: FederatedDataModule | None = None  # divided last
        self._owners: dict[str, Any] = {}
        self._training: Any = None
        self._replaced = ExitStack()

    def divide(self, trainer: Trainer) -> None:
        """Lets the trainer function that has begun run on clients; predictions are made on undivided data."""
        if self._make is None:
            return
        owners = data_owners(trainer)
        for owner in owners.values():
            if isinstance(owner, (FederatedDataModule, ClientLoaders)):
                raise ValueError(
                    f"partition must be left out of FederatedStrategy for data that is divided, found {owner!r}"
                )
        if trainer.state.fn == TrainerFn.FITTING:
            self._training = owners.get("train")
        elif owners:
            evaluated = next(iter(owners.values()))
            trains = is_module(evaluated) and is_overridden("train_dataloader", evaluated)
            owners = {"train": evaluated if trains else self._training, **owners}
        if not owners:
            return
        if owners.get("train") is None:
            if trainer.state.fn != TrainerFn.FITTING:
                rank_zero_warn(
                    "Clients are defined by their training data, and this strategy has seen none: the data are "
                    "evaluated undivided. Call trainer.fit first, or evaluate with a datamodule that has "
                    "train_dataloader."
                )
            return  # a fit without training data is Lightning's to refuse
        self._replaced.enter_context(data_replaced(trainer, self._federated(owners)))

    def _federated(self, owners: dict[str, Any]) -> FederatedDataModule:
        assert self._make is not None
        training = owners["train"]
        if isinstance(training, LightningDataModule) and all(owner is training for owner in owners.values()):
            owners, source = {"all": training}, training  # the division of a fit stays for the tests after it
        else:
            source = StageLoaders(owners)
        known = self.data is not None and owners.keys() == self._owners.keys()
        if not known or any(owners[stage] is not self._owners[stage] for stage in owners):
            self.data, self._owners = self._make(source), owners
            if not isinstance(self.data, FederatedDataModule):
                raise TypeError(f"partition must return a FederatedDataModule, found {type(self.data).__name__}")
        assert self.data is not None
        return self.data

    def restore(self) -> None:
        """The trainer function is over: the trainer has the data that it was called with."""
        self._replaced.close()
