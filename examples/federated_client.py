# SPDX-License-Identifier: Apache-2.0
"""Use 4: clients that train on their own, and a server by hand. Gives the bits of Trainer(strategy=...).fit."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import fl_lightning as fl


def module() -> fl.ClientModule:
    """The model that server and clients have."""
    torch.manual_seed(0)
    return fl.ClientModule(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)))


def main(rounds: int = 5) -> bool:
    """Three clients by hand under FedLF, and the same federation in a Trainer; returns whether weights are equal."""
    labels = torch.arange(90) % 3
    inputs = 2 * torch.eye(3)[labels, :2] + torch.randn(90, 2, generator=torch.Generator().manual_seed(0))
    dataset, owned = TensorDataset(inputs, labels), [range(15), range(15, 40), range(40, 90)]
    # Losses in training's batches, in all rounds: larger ones need a server that carries what clients find out of them.
    strategy = fl.FederatedStrategy(fl.algorithms.FedLF(), sampler=fl.data.AllClients(), loss_batch_size="training")
    # Each of these three may be a process on a machine of its own. It needs its data, and one message per round.
    clients = [
        fl.FederatedClient(module(), Subset(dataset, share), strategy, i, num_clients=3)
        for i, share in enumerate(owned)
    ]
    method, layout = fl.algorithms.FedLF(), fl.ParamLayout.from_module(module())
    theta = layout.flatten(layout.parameters(module()))
    for index in range(rounds):
        orders = [fl.ServerMessage(index, theta).to_client(i, method.client_rule()) for i in range(3)]
        sent = [client.train(order) for client, order in zip(clients, orders, strict=True)]
        cohort = fl.Cohort(
            params=theta,
            updates=fl.UpdateMatrix(torch.stack([message.update for message in sent]), layout),
            losses=[message.loss for message in sent],
            sizes=[message.size for message in sent],
            client_ids=(0, 1, 2),
            round=index,
        )
        theta = theta - method.aggregate(cohort)

    model = module()
    trainer = L.Trainer(max_epochs=rounds, strategy=strategy, logger=False, enable_checkpointing=False)
    trainer.fit(model, fl.FederatedDataModule(dataset, owned))
    equal = torch.equal(theta, layout.flatten(layout.parameters(model)))
    print("the weights are equal, bit for bit" if equal else "the weights differ")
    return equal


if __name__ == "__main__":
    main()
