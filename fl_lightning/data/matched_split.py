# SPDX-License-Identifier: Apache-2.0
"""Counts labels per client, and divides evaluation data so that a client is tested on what it trains on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fl_lightning.arguments import checked
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data.client_indices import Ints, parts_of
from fl_lightning.data.labels import integer_vector


@checked()
def matched_split(train_labels: Tensor, train_parts: Sequence[Tensor], eval_labels: Tensor, seed: int) -> list[Tensor]:
    """Divides evaluation samples in proportion to the clients' training labels.

    Each class is divided by largest remainders: client ``i`` gets ``n_eval * train_i / train`` of its samples, rounded
    down, and what is left goes to the largest remainders (ties in random order). A class without training samples is
    dealt round robin. Some clients would then train but have no evaluation data. Each of them, the largest first, gets
    one sample of a class that it trains on, the most frequent class first. The sample comes from the client that holds
    most of that class among those with at least two evaluation samples. If there is none, the client stays without.

    Args:
        train_labels: ``[n]`` integers.
        train_parts: one index tensor into the training data per client.
        eval_labels: ``[e]`` integers.
        seed: decides which samples go where; the same arguments give the same division.

    Returns:
        One ascending int64 index tensor per client; together every evaluation sample exactly once.

    Raises:
        ValueError: there are no clients, or labels are not integer vectors.
    """
    if not train_parts:
        raise ValueError(f"train_parts must hold at least one client, found {train_parts}")
    train_labels, eval_labels = (
        integer_vector(name, labels) for name, labels in (("train_labels", train_labels), ("eval_labels", eval_labels))
    )
    rng = np.random.default_rng(derive_seed(seed, "matched"))
    num_clients = len(train_parts)
    classes, eval_class = np.unique(eval_labels.cpu().numpy(), return_inverse=True)
    trained = _counts(train_labels.cpu().numpy(), train_parts, classes)
    share = np.zeros_like(trained)
    start = int(rng.integers(num_clients))
    for column, size in enumerate(np.bincount(eval_class, minlength=len(classes)).tolist()):
        weights = trained[:, column]
        if weights.any():
            share[:, column] = _largest_remainders(size, weights, rng)
        else:
            np.add.at(share[:, column], np.arange(start, start + size) % num_clients, 1)
            start += size
    _give_everyone_one(share, trained)
    owner = np.empty(len(eval_class), dtype=np.int64)
    for column in range(len(classes)):
        members = np.flatnonzero(eval_class == column)
        owner[rng.permutation(members)] = np.repeat(np.arange(num_clients), share[:, column])
    return parts_of(owner, num_clients)


@checked()
def label_counts(labels: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """``[N, C]`` int64: how many samples of each class each client holds, the classes in ascending order.

    Args:
        labels: ``[n]`` integers.
        parts: one index tensor per client.
    """
    vector = integer_vector("labels", labels).cpu()
    return torch.from_numpy(_counts(vector.numpy(), parts, torch.unique(vector).numpy()))


def _counts(labels: Ints, parts: Sequence[Tensor], classes: Ints) -> Ints:
    """``[N, C]`` samples of each client in each of some classes, which ascend."""
    counts = np.zeros((len(parts), len(classes)), dtype=np.int64)
    if len(classes) == 0:
        return counts
    column = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    known = classes[column] == labels
    for client, part in enumerate(parts):
        index = part.cpu().numpy()
        counts[client] = np.bincount(column[index][known[index]], minlength=len(classes))
    return counts


def _largest_remainders(size: int, weights: Ints, rng: np.random.Generator) -> Ints:
    total = int(weights.sum())
    share, remainder = np.divmod(size * weights, total)
    left = size - int(share.sum())
    ties = rng.permutation(len(weights))
    share[ties[np.argsort(-remainder[ties], kind="stable")[:left]]] += 1
    return np.asarray(share, dtype=np.int64)


def _give_everyone_one(share: Ints, trained: Ints) -> None:
    sizes, samples = share.sum(axis=1), trained.sum(axis=1)
    needy = np.flatnonzero((sizes == 0) & (samples > 0))
    for client in needy[np.argsort(-samples[needy], kind="stable")]:
        for column in np.argsort(-trained[client], kind="stable"):
            if trained[client, column] == 0:
                break
            donor = int(np.argmax(np.where(sizes > 1, share[:, column], 0)))
            if sizes[donor] > 1 and share[donor, column] > 0:
                share[donor, column] -= 1
                share[client, column] += 1
                sizes[donor] -= 1
                sizes[client] += 1
                break
