# SPDX-License-Identifier: Apache-2.0
"""Ways to divide a dataset among clients, as pure functions of labels and a seed.

Each returns an ascending int64 index tensor per client; together they hold every sample exactly once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.arguments import FILLED, Bounds, checked, shown
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data.labels import integer_vector

Ints = np.ndarray[Any, np.dtype[np.int64]]


@checked(num_samples=Bounds(0), num_clients=Bounds(1))
def iid(num_samples: int, num_clients: int, seed: int) -> list[Tensor]:
    """Deals all samples at random; client sizes differ by one at most.

    Raises:
        ValueError: there are more clients than samples.
    """
    check_clients(num_clients, num_samples)
    return deal(num_samples, num_clients, seed)


def deal(num_samples: int, num_clients: int, seed: int) -> list[Tensor]:
    """As :func:`iid`, but some clients stay empty where there are fewer samples than clients."""
    rng = generator(seed, "iid")
    return parts_of(rng.permutation(rng.permutation(num_clients)[np.arange(num_samples) % num_clients]), num_clients)


@checked(labels=FILLED, num_clients=Bounds(1), classes_per_client=Bounds(1))
def pathological(labels: Tensor | Sequence[int], num_clients: int, classes_per_client: int, seed: int) -> list[Tensor]:
    """Gives every client exactly ``classes_per_client`` distinct classes, drawn at random.

    Every class is used. The classes go to equally many clients (up to one, and never to more than they have samples),
    and a class is divided into parts that differ by one sample at most.

    Raises:
        ValueError: a client cannot have that many classes, or the clients are too few to use every class.
    """
    members, classes = by_class(labels)
    counts = np.array([len(index) for index in members], dtype=np.int64)
    check_clients(num_clients, int(counts.sum()))
    slots = num_clients * classes_per_client
    if classes_per_client > len(classes):
        raise ValueError(
            f"classes_per_client must lie between 1 and {len(classes)}, because the labels are {shown(classes)}, found "
            f"{classes_per_client}"
        )
    if slots < len(classes):
        raise ValueError(
            f"num_clients * classes_per_client must be at least {len(classes)} to use every class, found {slots}"
        )
    if int(np.minimum(counts, num_clients).sum()) < slots:
        raise ValueError(
            f"classes_per_client must leave each client a sample of each of its classes, found {classes_per_client} "
            f"for {num_clients} clients and classes of {counts.min()} to {counts.max()} samples"
        )
    rng = generator(seed, "pathological")
    takes = _draw_classes(counts, num_clients, classes_per_client, rng)
    owner = np.empty(int(counts.sum()), dtype=np.int64)
    for index, column in zip(members, takes.T, strict=True):
        clients = rng.permutation(np.flatnonzero(column))
        owner[rng.permutation(index)] = clients[np.arange(len(index)) % len(clients)]
    return parts_of(owner, num_clients)


@checked(labels=FILLED, num_clients=Bounds(1), shards_per_client=Bounds(1))
def shards(labels: Tensor | Sequence[int], num_clients: int, shards_per_client: int, seed: int) -> list[Tensor]:
    """Sorts by label, cuts into equal shards and deals ``shards_per_client`` random ones to each client.

    McMahan et al. 2017 (arXiv 1602.05629), section 3. Shard sizes differ by one at most; inside a class the order is
    random. A shard may hold the end of one class and the beginning of the next.

    Raises:
        ValueError: there are more shards than samples.
    """
    members, _ = by_class(labels)
    n, count = sum(map(len, members)), num_clients * shards_per_client
    check_clients(num_clients, n)
    if count > n:
        raise ValueError(
            f"shards_per_client must lie between 1 and {n // num_clients} for {n} samples and {num_clients} clients, "
            f"found {shards_per_client}"
        )
    rng = generator(seed, "shards")
    order = np.concatenate([rng.permutation(index) for index in members])
    dealt = rng.permutation(np.arange(count) % num_clients)
    owner = np.empty(n, dtype=np.int64)
    owner[order] = dealt[np.arange(n) * count // n]
    return parts_of(owner, num_clients)


@checked(labels=FILLED, num_clients=Bounds(1))
def mutex(labels: Tensor | Sequence[int], num_clients: int, seed: int) -> list[Tensor]:
    """One class per client; with more clients than classes, several clients share a class in equal parts.

    Raises:
        ValueError: there are fewer clients than classes, so that some class would go unused.
    """
    return pathological(labels, num_clients, 1, seed)


@checked(labels=FILLED, groups=FILLED)
def unbalanced(labels: Tensor | Sequence[int], groups: Sequence[Sequence[int]], seed: int) -> list[Tensor]:
    """One client per group of classes; a class named by several groups is divided into equal random parts.

    Args:
        labels: ``[n]`` integers.
        groups: label values per client, for instance ``((0,), (1, 2), (3, 4, 5, 6), (7,), (8, 9))``.
        seed: seed of the draw.

    Raises:
        ValueError: a class of the data is in no group, or a group names a class that the data does not have.
    """
    members, classes = by_class(labels)
    check_clients(len(groups), sum(map(len, members)))
    named = {value for group in groups for value in group}
    missing, unknown = sorted(set(classes) - named), sorted(named - set(classes))
    if missing or unknown or not all(groups):
        raise ValueError(
            f"groups must be non-empty and name every class of the data, found missing {missing}, unknown {unknown}"
        )
    rng = generator(seed, "unbalanced")
    owner = np.empty(sum(map(len, members)), dtype=np.int64)
    for index, value in zip(members, classes, strict=True):
        clients = rng.permutation([client for client, group in enumerate(groups) if value in group])
        owner[rng.permutation(index)] = clients[np.arange(len(index)) % len(clients)]
    return parts_of(owner, len(groups))


@checked(keys=FILLED)
def by_key(keys: Tensor | Sequence[Hashable]) -> list[Tensor]:
    """One client per distinct key: natural owners, sites or domains.

    Clients are numbered as :func:`distinct_keys` orders the keys.

    Raises:
        ValueError: there are no samples.
    """
    if isinstance(keys, Tensor) and keys.dim() != 1:
        raise ValueError(f"keys of by_key must be a vector, found {shown(keys)}")
    values = keys.tolist() if isinstance(keys, Tensor) else list(keys)
    order = distinct_keys(values)
    check_clients(len(order), len(values))
    client_of = {key: client for client, key in enumerate(order)}
    return parts_of(np.array([client_of[key] for key in values], dtype=np.int64), len(order))


def distinct_keys(keys: Sequence[Hashable]) -> list[Any]:
    """The distinct keys in ascending order; in order of first appearance if they cannot be compared."""
    seen: list[Any] = list(dict.fromkeys(keys))
    try:
        return sorted(seen)
    except TypeError:
        return seen


def generator(seed: int, name: str) -> np.random.Generator:
    """Random numbers of one kind of partition."""
    return np.random.default_rng(derive_seed(seed, name))


def check_clients(num_clients: int, num_samples: int) -> None:
    """Refuses more clients than samples."""
    if not 1 <= num_clients <= num_samples:
        raise ValueError(f"num_clients must lie between 1 and the {num_samples} samples, found {num_clients}")


def by_class(labels: Tensor | Sequence[int]) -> tuple[list[Ints], list[int]]:
    """Ascending sample indices of each class, and the classes in ascending order."""
    vector = integer_vector("labels", labels)
    if vector.numel() == 0:
        raise ValueError("labels must not be empty, found shape [0]")
    classes, counts = np.unique(vector.cpu().numpy(), return_counts=True)
    order = np.argsort(vector.cpu().numpy(), kind="stable")
    return np.split(order, np.cumsum(counts)[:-1]), [int(value) for value in classes]


def parts_of(owner: Ints, num_clients: int) -> list[Tensor]:
    """The samples of each client, from the client of each sample ``[n]``."""
    flat = torch.from_numpy(np.argsort(owner, kind="stable"))
    return list(torch.split(flat, np.bincount(owner, minlength=num_clients).tolist()))


def _draw_classes(counts: Ints, num_clients: int, per_client: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """``[N, C]`` booleans with ``per_client`` true values in every row and nearly equal column sums."""
    caps, quota = np.minimum(counts, num_clients), np.zeros_like(counts)
    left = num_clients * per_client
    while left:
        room = np.flatnonzero(quota < caps)
        room = room if len(room) <= left else rng.choice(room, left, replace=False)
        quota[room] += 1
        left -= len(room)
    takes = np.zeros((num_clients, len(counts)), dtype=bool)
    for position, client in enumerate(rng.permutation(num_clients)):
        # A class that still needs as many clients as are left must be taken now; the others go by their need.
        with np.errstate(divide="ignore"):
            rank = rng.standard_exponential(len(counts)) / quota
        rank[quota == num_clients - position] = -1.0
        chosen = np.argsort(rank, kind="stable")[:per_client]
        takes[client, chosen] = True
        quota[chosen] -= 1
    return takes
