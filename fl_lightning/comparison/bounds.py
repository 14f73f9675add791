# SPDX-License-Identifier: Apache-2.0
"""The two bounds of a comparison: each client alone, and all clients' data together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from fl_lightning.algorithms import FedAvg
from fl_lightning.data.client_indices import ClientIndices
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.sources import defines, hide
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.lightning.inspection import TRANSFER_HOOKS
from fl_lightning.lightning.names import LightningDataModule
from fl_lightning.report import FitRecord


def bound_strategy(strategy: FederatedStrategy, clients: int) -> FederatedStrategy:
    """How one learner trains in as many rounds, and with as many passes over its data in each, as a client does.

    The learner is the only client of its fit and keeps its optimizer from round to round, so that the rounds are plain
    training. A number of local steps counts for each client whose data it has.

    Args:
        strategy: of the methods.
        clients: how many clients' data the learner has.
    """
    steps = strategy.arguments.get("local_steps")
    return strategy.with_arguments(
        algorithm=FedAvg(),
        client=None,
        clients_per_round=1.0,
        local_steps=None if steps is None else steps * clients,
        full_gradients=False,
        server_optimizer=None,
        sampler=None,
        client_optimizer_state="keep",
        guard=None,
        attack=None,
        executor=None,
        min_clients=1,
        partition=None,
    )


class OneLearner(LightningDataModule):
    """Federated data with the training data of some clients in the hands of one, set up once for several fits.

    Args:
        data: the federated data, not yet set up.

    Attributes:
        names: what people call the clients.
        sizes: their training samples.
        clients: those that have any.
    """

    def __init__(self, data: LightningDataModule) -> None:
        super().__init__()
        assert isinstance(data, FederatedDataModule)
        self.federated = data
        self._set_up: set[str] = set()
        self._learning: Sequence[int] = ()
        self._evaluated: Sequence[int] | None = None
        data.prepare_data()
        self.setup("fit")
        self.names, self.sizes = data.client_names, tuple(data.client_sizes.tolist())
        self.clients = [client for client, size in enumerate(self.sizes) if size]
        stages = [f"{stage}_dataloader" for stage in ("val", "test", "predict")]
        hide(self, [method for method in (*stages, *TRANSFER_HOOKS) if not defines(data, method)])

    def choose(self, learning: Sequence[int], evaluated: Sequence[int] | None) -> None:
        """Says what the next fit is about.

        Args:
            learning: the clients whose training data the learner has.
            evaluated: the clients that are evaluated; ``None`` for all.
        """
        self._learning, self._evaluated = learning, evaluated

    def renamed(self, record: FitRecord) -> FitRecord:
        """A record of a fit on all clients' data, with the clients in the place of the learner."""
        names = (*self.names, *record.client_names[len(self.names) :])  # those that are only evaluated come last
        sizes = (*self.sizes, *(0 for _ in names[len(self.names) :]))
        return replace(record, client_names=names, client_sizes=sizes, weights=None, layer_conflicts=None)

    def __getattr__(self, name: str) -> Any:
        # Modules read `self.trainer.datamodule.num_classes` and the like.
        if name.startswith("_") or "federated" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.federated, name)

    def __repr__(self) -> str:
        return f"{self.federated!r} The data of {len(self._learning)} clients are those of one learner."

    __str__ = __repr__

    def setup(self, stage: str) -> None:
        """Sets the federated data up, the first time."""
        if stage not in self._set_up:
            self._set_up.add(stage)
            self.federated.setup(stage)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The federated data's hook."""
        return self.federated.on_before_batch_transfer(batch, dataloader_idx)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The federated data's hook."""
        return self.federated.transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The federated data's hook."""
        return self.federated.on_after_batch_transfer(batch, dataloader_idx)

    def train_dataloader(self) -> ClientLoaders:
        """The chosen clients' training data, as those of one client."""
        loaders = self.federated.train_dataloader()
        together = torch.cat([loaders.indices(client) for client in self._learning]).sort().values
        parts = ClientIndices([together], len(loaders.dataset))  # type: ignore[arg-type]
        return ClientLoaders(loaders.dataset, parts, "train", loaders.settings)

    def val_dataloader(self) -> ClientLoaders | list[Any]:
        """The evaluated clients' validation data."""
        return self._of_evaluated(self.federated.val_dataloader(), "val")

    def test_dataloader(self) -> ClientLoaders | list[Any]:
        """The evaluated clients' test data."""
        return self._of_evaluated(self.federated.test_dataloader(), "test")

    def _of_evaluated(
        self, loaders: ClientLoaders | list[Any], stage: Literal["val", "test"]
    ) -> ClientLoaders | list[Any]:
        if self._evaluated is None:
            return loaders
        found = []
        for one in loaders if isinstance(loaders, list) else [loaders]:
            vectors = [one.indices(client) for client in self._evaluated]
            names = tuple(one.names[client] for client in self._evaluated)
            parts = ClientIndices(vectors, len(one.dataset), names)  # type: ignore[arg-type]
            found.append(ClientLoaders(one.dataset, parts, stage, one.settings))
        if not any(one.sizes.any() for one in found):
            return []
        return found if isinstance(loaders, list) else found[0]
