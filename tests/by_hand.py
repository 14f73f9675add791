# SPDX-License-Identifier: Apache-2.0
"""A server by hand over clients of their own: no Trainer, no strategy, no sampler of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from support import federated_blobs, reload
from torch import Tensor
from torch.utils.data import DataLoader, Subset

import fl_lightning as fl
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.core.tensors import empty_rows
from fl_lightning.fit.checks import paired_client_rule


def wired(message: Any) -> Any:
    """A message as it arrives: written to a file of plain tensors and read from it."""
    return type(message)(**reload(vars(message)))


def stacked(vectors: Sequence[Tensor]) -> Tensor:
    """Rows as a fit has them."""
    return torch.stack(list(vectors), out=empty_rows(len(vectors), vectors[0]))


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
    """Clients that train when they are told to, and the server's half of a method.

    Args:
        method: makes the method, anew for the server and for every client.
        module: makes the module of the server, and those of the clients from another seed.
        data: the data of all clients, of which each is given its own.
        client: makes the client half of another method.
        trainer: the clients' options of the Trainer.
        clock: what messages say about the length of rounds and of the fit.
        folder: where clients keep their files.
        options: of the strategy; ``buffers`` is the server's, too.
    """

    def __init__(
        self,
        method: Callable[[], Any],
        module: Callable[[int], L.LightningModule],
        data: fl.FederatedDataModule | None = None,
        client: Callable[[], Any] | None = None,
        trainer: dict[str, Any] | None = None,
        clock: dict[str, int] | None = None,
        folder: Any = None,
        **options: Any,
    ) -> None:
        data = federated_blobs(4) if data is None else data
        self.method, self.module = method(), module(0)
        if (trainer or {}).get("precision") == "64-true":
            self.module.double()
        half = None if client is None else client()
        strategy = fl.FederatedStrategy(method(), client=None if client is None else client(), **options)
        self.rule = paired_client_rule(self.method, half)
        self.layout = fl.ParamLayout.from_module(self.module, self.method.layers)
        self.params = self.layout.flatten(self.layout.parameters(self.module))
        self.bank = BufferBank(self.module, options.get("buffers", "mean"))
        self._made: dict[int, fl.FederatedClient] = {}

        def made(client_id: int) -> fl.FederatedClient:
            return fl.FederatedClient(
                module(100 + client_id), own_loader(client_id, data), strategy, client_id, data.num_clients,
                trainer={"accelerator": "cpu", **(trainer or {})}, folder=folder,
            )  # fmt: skip

        self._make, self._in_files = made, folder is not None
        self._num_clients, self._num_samples = data.num_clients, int(data.train_dataloader().sizes.sum())
        self.counted: dict[int, int] = {}
        self.clock = clock or {}
        federation = fl.algorithms.Federation(
            data.num_clients, self.layout, torch.device("cpu"), self.params.dtype, cohort_size=3
        )
        self.method.begin_fit(federation)
        self.rule.begin_fit(federation)

    def client(self, client_id: int) -> fl.FederatedClient:
        """A client; a new object every time, as after a restart of its process, if what it keeps lies in files."""
        if self._in_files or client_id not in self._made:
            self._made[client_id] = self._make(client_id)
        return self._made[client_id]

    def message(self, client_id: int, when: int) -> fl.ServerMessage:
        counted, buffers = self.counted.get(client_id), self.bank.global_values()
        message = fl.ServerMessage.to_client(
            client_id, self.rule, when, self.params, counted, buffers, **self.clock
        )  # fmt: skip
        return wired(message)

    def round(self, when: int, cohort: Sequence[int], lost: Collection[int] = ()) -> None:
        """One round; what clients in ``lost`` send does not count."""
        orders = {i: self.message(i, when) for i in cohort}
        sent = [wired(self.client(i).train(orders[i])) for i in cohort]
        counted = [message for message in sent if message.client_id not in lost]
        rates = [message.client_lr for message in counted]
        ids = tuple(message.client_id for message in counted)

        def losses_at(params: Tensor) -> Tensor:
            asked = [self.client(i).loss(replace(orders[i], params=params)) for i in ids]
            return torch.tensor(asked, dtype=torch.float64)

        cohort_of_round = fl.Cohort(
            params=self.params,
            updates=fl.UpdateMatrix(stacked([message.update for message in counted]), self.layout),
            losses=None if counted[0].loss is None else [message.loss for message in counted],
            sizes=[message.size for message in counted],
            client_ids=ids,
            round=when,
            client_lr=None if None in rates else fl.algorithms.mean_rate(rates),
            num_clients=self._num_clients,
            num_samples=self._num_samples,
            extras={name: torch.stack([message.extras[name] for message in counted]) for name in counted[0].extras},
            companions={
                name: fl.UpdateMatrix(stacked([message.companions[name] for message in counted]), self.layout)
                for name in counted[0].companions
            },
            losses_at=losses_at,
        )
        step = self.rule.adjust_step(cohort_of_round, self.method.aggregate(cohort_of_round))
        self.rule.commit(cohort_of_round)
        self.params = self.params - step
        self.bank.commit([self.bank.report_with(message.size, message.buffers) for message in counted])
        self.counted |= dict.fromkeys(ids, when)

    def weights(self) -> Tensor:
        """All parameters and buffers, as :func:`support.weights` has those of a module."""
        params = self.method.evaluation_params(self.params)
        for parameter, view in zip(self.layout.parameters(self.module), self.layout.views(params), strict=True):
            parameter.data = view.clone()
        self.bank.restore()
        return torch.cat([t.detach().double().flatten() for t in self.module.state_dict().values()])
