# SPDX-License-Identifier: Apache-2.0
"""What a client sends and receives in a round, counted on the messages of a real federation.

A federation of two clients with a few samples each runs for some rounds through :class:`fl_lightning.FederatedServer`
and :class:`fl_lightning.FederatedClient`. The messages are those of a federation of any size: they depend on the model,
not on the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

import fl_lightning as fl
from fl_lightning.data import IID

ROUNDS, CLIENTS, SAMPLES, SEED = 4, 2, 24, 0
NUMBER = 8  # bytes of a number outside of tensors
METHOD = ("algorithm", "client", "local_epochs", "full_gradients", "server_optimizer")


@dataclass(frozen=True)
class Traffic:
    """Bytes of one client in one round, on average over the rounds but for the first.

    Attributes:
        up: from the client to the server.
        down: from the server to the client; parameters at which it is asked for its loss as well.
    """

    up: float
    down: float


def measured(strategy: fl.FederatedStrategy, learner: Callable[..., Any], dataset: Any, rate: float = 0.1) -> Traffic:
    """Runs the federation, from the same first weights for every method: how often FedMDFG asks depends on them.

    Args:
        strategy: the method.
        learner: makes the module from a learning rate.
        dataset: training samples.
        rate: learning rate.
    """
    few = Subset(dataset, range(SAMPLES))
    data = fl.FederatedDataModule(few, IID(CLIENTS), labels=[0] * SAMPLES, batch_size=SAMPLES // CLIENTS)
    torch.manual_seed(SEED)
    strategy = fl.FederatedStrategy(**_of(strategy), sampler=fl.data.AllClients())
    server = fl.FederatedServer(learner(lr=rate), strategy, CLIENTS, rounds=ROUNDS)
    clients = [fl.FederatedClient(learner(lr=rate), data, strategy, k) for k in range(CLIENTS)]
    for client in clients:
        server.register(client.introduction())
    rounds: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        ids = server.open_round()
        messages = {k: server.message(k) for k in ids}
        answers = {k: clients[k].train(messages[k]) for k in ids}
        asked: list[Tensor] = []

        def losses_at(
            params: Tensor,
            which: Sequence[int],
            messages: Mapping[int, Any] = messages,
            asked: list[Tensor] = asked,
        ) -> dict[int, float]:
            asked.append(params)
            return {k: clients[k].loss(replace(messages[k], params=params)) for k in which}

        up = fmean(size_of(vars(answer)) for answer in answers.values())
        down = fmean(size_of(vars(message)) for message in messages.values())
        server.close_round(answers, losses_at=losses_at)
        rounds.append((up + NUMBER * len(asked), down + sum(map(size_of, asked))))
    up, down = (fmean(column) for column in zip(*rounds[1:], strict=True))
    return Traffic(up, down)


def size_of(value: Any) -> int:
    """Bytes of the tensors and numbers in a message."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(size_of, value))
    return NUMBER * isinstance(value, (int, float))


def _of(strategy: fl.FederatedStrategy) -> dict[str, Any]:
    return {name: value for name, value in strategy.with_arguments().arguments.items() if name in METHOD}
