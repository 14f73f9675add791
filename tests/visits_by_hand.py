# SPDX-License-Identifier: Apache-2.0
"""Rounds by hand in which every client trains a copy of the module, its own to the last object, and their data."""

from __future__ import annotations

import copy
from collections import deque

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from visit_variants import WIDTH

PARTS = torch.arange(44).split([12, 9, 23])
"""Of the clients: two, one and three batches."""


class Samples(L.LightningDataModule):
    """A batch size that leaves a short batch, in the same order at every pass; of everybody, or of one client."""

    def __init__(self, client=None):
        super().__init__()
        torch.manual_seed(4)
        x = torch.randn(44, WIDTH)
        samples = TensorDataset(x, x.sum(1))
        self.samples = samples if client is None else Subset(samples, PARTS[client].tolist())

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=10)


def rounds_by_hand(part, batches, rounds, lost=False):
    """A part of :class:`Together` after rounds; ``lost``: all but weights is as it was in the beginning."""
    first, sizes = copy.deepcopy(part), torch.tensor([float(sum(len(y) for _, y in mine)) for mine in batches])
    largest = int(sizes.argmax())
    for _ in range(rounds):
        visits = [trained(copy.deepcopy(part), mine) for mine in batches]
        before, part = part, first if lost else visits[largest]
        join_lists(part, before, visits, list(map(len, batches)))
        part = copy.deepcopy(part)
        with torch.no_grad():
            for kind in (nn.Module.named_parameters, nn.Module.named_buffers):
                for name, value in kind(part):
                    if value.is_floating_point():
                        stacked = torch.stack([dict(kind(visit))[name] for visit in visits])
                        value.copy_((sizes @ stacked.reshape(len(visits), -1) / sizes.sum()).view_as(value))
    return part


def trained(part, batches):
    empty(part)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.05)
    for x, y in batches:
        optimizer.zero_grad()
        part(x, y).backward()
        optimizer.step()
    for name, value in vars(part).items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            setattr(part, name, value.detach())  # nobody can copy a graph
    return part


def empty(part):
    """Metrics begin empty if clients can be joined."""
    inside = [value for held in vars(part).values() if isinstance(held, dict) for value in held.values()]
    for value in inside:
        if isinstance(value, (MeanMetric, SumMetric, MetricCollection)):
            value.reset()


def join_lists(kept, before, found, steps):
    """Lists in ``kept``, the largest client's, have what all have added to those of before."""
    own = kept if isinstance(kept, dict) else getattr(kept, "__dict__", {})
    for key, mine in list(own.items()):
        then, *theirs = ((one if isinstance(one, dict) else vars(one)).get(key) for one in (before, *found))
        if isinstance(mine, (list, deque)) and then is not None:
            full, start = getattr(mine, "maxlen", None), list(then)
            added = [list(items or ())[-n if full else len(start) :] for items, n in zip(theirs, steps, strict=True)]
            if any(added) and (full or all(repr(list(items or ())[: len(start)]) == repr(start) for items in theirs)):
                first = list(mine)[: len(start)]
                mine.clear()
                mine.extend([*first, *(item for items in added for item in items)])
        elif then is not None and (isinstance(mine, dict) or type(mine).__module__ == "visit_variants"):
            join_lists(mine, then, theirs, steps)
