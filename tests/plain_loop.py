# SPDX-License-Identifier: Apache-2.0
"""Federated training and evaluation written by hand: nothing of the library but its data views, seeds and cohorts."""

import torch
import torch.nn.functional as F
from support import federated_blobs, fresh, weights

from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.data.cohort_samplers import UniformSampler


def client_batches(stage="train", data=None):
    """The clients' loaders, set up without a trainer."""
    data = federated_blobs() if data is None else data
    data.prepare_data()
    data.setup("fit" if stage != "test" else "test")
    return getattr(data, f"{stage}_dataloader")()


def assert_trained_to(module, expected, atol=1e-6):
    """Two modules end alike, and away from where they began."""
    assert torch.allclose(weights(module), weights(expected), atol=atol, rtol=0)
    assert not torch.allclose(weights(module), weights(fresh(type(module))), atol=1e-2)


def federate(module, rounds, train_client, *, data=None, cohort=3, seed=5, epochs=1, limit=None, after_round=None):
    """FedAvg by hand.

    ``train_client(module, batches, round)`` does all that a client does; ``after_round(module, round)`` runs once the
    global model is in place; ``limit(n)`` tells how many of a client's ``n`` batches count.
    """
    loaders = client_batches(data=data)
    for index in range(rounds):
        start = [p.detach().clone() for p in module.parameters()]
        total = [torch.zeros_like(p, dtype=torch.float64) for p in start]
        chosen = UniformSampler().select(index, cohort, loaders.sizes, derive_seed(seed, "sampler")).client_ids
        size = sum(int(loaders.sizes[c]) for c in chosen)
        for client in chosen:
            assign(module, start)
            with isolated(derive_seed(seed, "client", index, client), torch.device("cpu")):
                seeds = [derive_seed(seed, "shuffle", index, client, epoch) for epoch in range(epochs)]
                batches = [batch for each in seeds for batch in loaders.batches(client, seed=each)]
                kept = len(batches) if limit is None else limit(len(batches))
                train_client(module, [batch for batch, _ in batches[:kept]], index)
            for t, p in zip(total, module.parameters(), strict=True):
                t += p.detach().double() * int(loaders.sizes[client]) / size
        assign(module, total)
        if after_round is not None:
            after_round(module, index)
    return module


@torch.no_grad()
def assign(module, values):
    for p, v in zip(module.parameters(), values, strict=True):
        p.copy_(v)


def sgd(lr=0.1, change_gradients=None, momentum=0.0):
    """A client that takes one step of SGD per batch."""

    def train_client(module, batches, index):
        rate = lr(index) if callable(lr) else lr
        optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=momentum)
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            if change_gradients is not None:
                change_gradients(list(module.parameters()))
            optimizer.step()

    return train_client


@torch.no_grad()
def evaluate(module, stage="val", data=None, limit=None):
    """``{client: (loss, accuracy, samples)}`` and the same of all their data pooled."""
    loaders = client_batches(stage, data)
    module.eval()
    outputs = {}
    for client in range(len(loaders)):
        batches = [batch for batch, _ in loaders.batches(client, seed=None)][:limit]
        if batches:
            x, y = (torch.cat(column) for column in zip(*batches, strict=True))
            outputs[client] = (module(x), y)
    pooled = tuple(torch.cat(column) for column in zip(*outputs.values(), strict=True))
    return {client: _numbers(*output) for client, output in outputs.items()}, _numbers(*pooled)


def _numbers(logits, y):
    return float(F.cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean()), len(y)
