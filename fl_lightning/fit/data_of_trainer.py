# SPDX-License-Identifier: Apache-2.0
"""Divides the data that a Trainer was called with, where a project cannot wrap it itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from fl_lightning.arguments import shown
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.partitions import Partition
from fl_lightning.data.sources import StageLoaders, is_module
from fl_lightning.lightning.inspection import is_overridden
from fl_lightning.lightning.names import LightningDataModule, Trainer, TrainerFn, rank_zero_warn
from fl_lightning.lightning.single_device import data_owners, data_replaced

PartitionLike = Partition | Sequence[Tensor] | Sequence[Sequence[int]] | Callable[[Any], FederatedDataModule]
"""How to divide, or a function that makes the federated data from the data of a Trainer."""


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
