# SPDX-License-Identifier: Apache-2.0
"""Ways to divide samples among clients: equal shares, and shares of classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.arguments import FILLED, Bounds, checked, shown
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data.client_indices import Ints, parts_of
from fl_lightning.data.labels import Samples, integer_vector
from fl_lightning.data.matched_split import matched_split


class Partition(ABC):
    """How samples are divided among clients. Not a dataclass: jsonargparse refuses subclasses of dataclass types."""

    @abstractmethod
    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Divides samples by their labels ``[n]``: one int64 index tensor per client, every sample exactly once."""

    def divide(self, samples: Samples, seed: int) -> list[Tensor]:
        """Divides a dataset; looks its labels up unless the partition does without them."""
        return self.split(samples.labels, seed)

    def match(self, train: Samples, parts: Sequence[Tensor], samples: Samples, seed: int) -> list[Tensor]:
        """Divides evaluation samples so that they follow the clients' training data."""
        return matched_split(train.labels, parts, samples.labels, seed)

    def anew(self, train: Samples, samples: Samples, seed: int) -> tuple[list[Tensor], tuple[str, ...]]:
        """Divides evaluation samples by the partition itself; clients keep their numbers.

        Returns:
            One index tensor per client, first those of the training data; and the names of the others.
        """
        return self.divide(samples, seed), ()

    def names(self, train: Samples) -> tuple[str, ...] | None:
        """What people call the clients; ``None`` if they have numbers only."""
        return None


@checked(num_clients=Bounds(1))
@dataclass(frozen=True)
class IID(Partition):
    """Deals all samples at random; client sizes differ by one at most.

    Needs no labels: evaluation data is dealt at random as well.
    """

    num_clients: int

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Uses only the number of labels; refuses fewer samples than clients."""
        check_clients(self.num_clients, len(labels))
        return deal(len(labels), self.num_clients, seed)

    def divide(self, samples: Samples, seed: int) -> list[Tensor]:
        """Deals the samples; labels are not looked up."""
        check_clients(self.num_clients, len(samples))
        return deal(len(samples), self.num_clients, seed)

    def match(self, train: Samples, parts: Sequence[Tensor], samples: Samples, seed: int) -> list[Tensor]:
        """Deals the evaluation samples; with fewer samples than clients, some clients have none."""
        return deal(len(samples), self.num_clients, seed)


@checked(num_clients=Bounds(1), classes_per_client=Bounds(1))
@dataclass(frozen=True)
class Pathological(Partition):
    """Gives every client exactly ``classes_per_client`` distinct classes, drawn at random.

    Every class is used. The classes go to equally many clients (up to one, and never to more than they have samples),
    and a class is divided into parts that differ by one sample at most.
    """

    num_clients: int
    classes_per_client: int = 2

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Draws classes for the clients.

        Raises:
            ValueError: a client cannot have that many classes, or the clients are too few to use every class.
        """
        members, classes = by_class(labels)
        counts = np.array([len(index) for index in members], dtype=np.int64)
        check_clients(self.num_clients, int(counts.sum()))
        each, slots = self.classes_per_client, self.num_clients * self.classes_per_client
        if each > len(classes):
            raise ValueError(
                f"classes_per_client must lie between 1 and {len(classes)}, because the labels are {shown(classes)}, "
                f"found {each}"
            )
        if slots < len(classes):
            raise ValueError(
                f"num_clients * classes_per_client must be at least {len(classes)} to use every class, found {slots}"
            )
        if int(np.minimum(counts, self.num_clients).sum()) < slots:
            raise ValueError(
                f"classes_per_client must leave each client a sample of each of its classes, found {each} "
                f"for {self.num_clients} clients and classes of {counts.min()} to {counts.max()} samples"
            )
        rng = generator(seed, "pathological")
        takes = _draw_classes(counts, self.num_clients, each, rng)
        return _dealt(members, [np.flatnonzero(column) for column in takes.T], self.num_clients, rng)


@checked(num_clients=Bounds(1), shards_per_client=Bounds(1))
@dataclass(frozen=True)
class Shards(Partition):
    """Sorts by label, cuts into equal shards and deals ``shards_per_client`` random ones to each client.

    McMahan et al. 2017 (arXiv 1602.05629), section 3. Shard sizes differ by one at most; inside a class the order is
    random. A shard may hold the end of one class and the beginning of the next.
    """

    num_clients: int
    shards_per_client: int = 2

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Deals shards; refuses fewer samples than shards."""
        members, _ = by_class(labels)
        n, count = sum(map(len, members)), self.num_clients * self.shards_per_client
        check_clients(self.num_clients, n)
        if count > n:
            raise ValueError(
                f"shards_per_client must lie between 1 and {n // self.num_clients} for {n} samples and "
                f"{self.num_clients} clients, found {self.shards_per_client}"
            )
        rng = generator(seed, "shards")
        order = np.concatenate([rng.permutation(index) for index in members])
        dealt = rng.permutation(np.arange(count) % self.num_clients)
        owner = np.empty(n, dtype=np.int64)
        owner[order] = dealt[np.arange(n) * count // n]
        return parts_of(owner, self.num_clients)


@checked(num_clients=Bounds(1))
@dataclass(frozen=True)
class Mutex(Partition):
    """One class per client; with more clients than classes, several clients share a class in equal parts."""

    num_clients: int

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Deals classes; refuses fewer clients than classes, because some class would go unused."""
        return Pathological(self.num_clients, 1).split(labels, seed)


@checked(groups=FILLED)
@dataclass(frozen=True)
class Unbalanced(Partition):
    """One client per group of classes; a class named by several groups is divided into equal random parts.

    Args:
        groups: label values per client; the default are FedMDFG's groups for ten classes.
    """

    groups: tuple[tuple[int, ...], ...] = ((0,), (1, 2), (3, 4, 5, 6), (7,), (8, 9))

    @property
    def num_clients(self) -> int:
        """One client per group."""
        return len(self.groups)

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Gives each client its group.

        Raises:
            ValueError: a class of the data is in no group, or a group names a class that the data does not have.
        """
        members, classes = by_class(labels)
        check_clients(len(self.groups), sum(map(len, members)))
        named = {value for group in self.groups for value in group}
        missing, unknown = sorted(set(classes) - named), sorted(named - set(classes))
        if missing or unknown:
            raise ValueError(
                f"groups must name every class of the data and no other, found missing {missing}, unknown {unknown}"
            )
        having = [[client for client, group in enumerate(self.groups) if value in group] for value in classes]
        return _dealt(members, having, len(self.groups), generator(seed, "unbalanced"))


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


def deal(num_samples: int, num_clients: int, seed: int) -> list[Tensor]:
    """Equal random shares; some clients stay empty where there are fewer samples than clients."""
    rng = generator(seed, "iid")
    return parts_of(rng.permutation(rng.permutation(num_clients)[np.arange(num_samples) % num_clients]), num_clients)


def _dealt(members: list[Ints], having: Sequence[Any], num_clients: int, rng: np.random.Generator) -> list[Tensor]:
    """Each class in equal random parts to the clients that have it."""
    owner = np.empty(sum(map(len, members)), dtype=np.int64)
    for index, clients in zip(members, having, strict=True):
        own = rng.permutation(clients)
        owner[rng.permutation(index)] = own[np.arange(len(index)) % len(own)]
    return parts_of(owner, num_clients)


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
