# SPDX-License-Identifier: Apache-2.0
"""Servers and clients that only messages join, without a transport."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
from support import federated_blobs, fresh, reload
from torch import Tensor
from torch.utils.data import DataLoader, Subset

import fl_lightning as fl

CARRIED = ("FedAvg", "FedFa", "SCAFFOLD", "Ditto", "FedBN", "FedMDFG")
"""Methods of which messages hold all there is: extras, companions, state on both sides, models, losses once more."""


def wired(message: Any) -> Any:
    """A message as it arrives: written to a file of plain tensors and read from it."""
    return type(message)(**reload(vars(message)))


def own_loader(client_id: int, data: fl.FederatedDataModule) -> DataLoader:
    """One client's samples in a loader of its own."""
    loaders = data.train_dataloader()
    share = Subset(loaders.dataset, loaders.indices(client_id).tolist())
    return DataLoader(share, batch_size=loaders.batch_size, shuffle=True)


class Own(L.LightningDataModule):
    """One client's share of the blobs, for training and validation."""

    def __init__(self, client: int, clients: int = 4) -> None:
        super().__init__()
        self.client, self.all = client, federated_blobs(clients)

    def train_dataloader(self) -> DataLoader:
        return own_loader(self.client, self.all)

    def val_dataloader(self) -> DataLoader:
        return self._evaluated(self.all.val_dataloader())

    def _evaluated(self, loaders: Any) -> DataLoader:
        share = Subset(loaders.dataset, loaders.indices(self.client).tolist())
        return DataLoader(share, batch_size=loaders.batch_size)


class WithTests(Own):
    """With data to test."""

    def test_dataloader(self) -> DataLoader:
        return self._evaluated(self.all.test_dataloader())


class Federation:
    """A server and clients that it knows by their messages alone; messages go through files.

    Args:
        strategy: of all of them.
        make: makes the server's module from seed 0, and those of the clients from other seeds.
        clients: their number.
        data: makes a client's own data from its id.
        trainer: the clients' options of the Trainer.
        rounds: of the whole federation.
        folder: where clients keep their files; they are then new objects in every round, as after a restart.
    """

    def __init__(
        self,
        strategy: fl.FederatedStrategy,
        make: Callable[[int], L.LightningModule] = lambda seed: fresh(seed=seed),
        clients: int = 4,
        data: Callable[[int], Any] = Own,
        trainer: dict[str, Any] | None = None,
        rounds: int | None = None,
        folder: Any = None,
    ) -> None:
        trainer = {"accelerator": "cpu", **(trainer or {})}
        precision = trainer.get("precision", "32-true")
        self.server = fl.FederatedServer(make(0), strategy, clients, precision, rounds=rounds)
        self._make = lambda k: fl.FederatedClient(make(50 + k), data(k), strategy, k, clients, trainer, folder)
        self._made = [self._make(k) for k in range(clients)]
        self._in_files = folder is not None
        for client in self._made:
            self.server.register(wired(client.introduction()))

    @property
    def clients(self) -> list[fl.FederatedClient]:
        """All clients."""
        return [self._make(k) for k in range(len(self._made))] if self._in_files else self._made

    def round(self, lost: Collection[int] = ()) -> fl.RoundRecord:
        """One round, whose answers come in reverse order; what ``lost`` ones send does not arrive."""
        server, clients = self.server, self.clients
        orders = {k: wired(server.message(k)) for k in server.open_round()}
        answers = {k: wired(clients[k].train(order)) for k, order in reversed(orders.items())}

        def losses_at(params: Tensor, ids: Sequence[int]) -> dict[int, float]:
            return {k: clients[k].loss(replace(orders[k], params=params)) for k in ids}

        arrived = {k: answer for k, answer in answers.items() if k not in lost}
        return server.close_round(arrived, dict.fromkeys(lost, "lost on the way"), losses_at)

    def run(self, rounds: int) -> L.LightningModule:
        """So many rounds, and the module as it is after the last."""
        for _ in range(rounds):
            self.round()
        self.server.finish()
        return self.server.module
