# SPDX-License-Identifier: Apache-2.0
"""The partitions as values that configuration files can name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.arguments import ANY, FILLED, Bounds, check, checked
from fl_lightning.data import partition_functions as partitions
from fl_lightning.data.dirichlet_functions import dirichlet, dirichlet_classes
from fl_lightning.data.labels import Samples, attribute_of
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
    """Equal random shares, see :func:`iid`. Needs no labels: evaluation data is dealt at random as well."""

    num_clients: int

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Uses only the number of labels."""
        return partitions.iid(len(labels), self.num_clients, seed)

    def divide(self, samples: Samples, seed: int) -> list[Tensor]:
        """Deals the samples; labels are not looked up."""
        return partitions.iid(len(samples), self.num_clients, seed)

    def match(self, train: Samples, parts: Sequence[Tensor], samples: Samples, seed: int) -> list[Tensor]:
        """Deals the evaluation samples; with fewer samples than clients, some clients have none."""
        return partitions.deal(len(samples), self.num_clients, seed)


@checked(num_clients=Bounds(1), alpha=Bounds(above=0), min_size=Bounds(0))
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Shares of each class over the clients, from a Dirichlet distribution, see :func:`dirichlet`."""

    num_clients: int
    alpha: float
    min_size: int = 1
    capped: bool = False

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Draws the clients' shares of each class."""
        return dirichlet(labels, self.num_clients, self.alpha, seed, self.min_size, self.capped)


@checked(num_clients=Bounds(1), alpha=Bounds(above=0))
@dataclass(frozen=True)
class DirichletClasses(Partition):
    """Shares of each client over the classes, from a Dirichlet distribution, see :func:`dirichlet_classes`."""

    num_clients: int
    alpha: float

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Draws the classes' shares of each client."""
        return dirichlet_classes(labels, self.num_clients, self.alpha, seed)


@checked(num_clients=Bounds(1), classes_per_client=Bounds(1))
@dataclass(frozen=True)
class Pathological(Partition):
    """Exactly ``classes_per_client`` classes for every client, see :func:`pathological`."""

    num_clients: int
    classes_per_client: int = 2

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Draws classes for the clients."""
        return partitions.pathological(labels, self.num_clients, self.classes_per_client, seed)


@checked(num_clients=Bounds(1), shards_per_client=Bounds(1))
@dataclass(frozen=True)
class Shards(Partition):
    """Shards of data sorted by label, see :func:`shards`."""

    num_clients: int
    shards_per_client: int = 2

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Deals shards."""
        return partitions.shards(labels, self.num_clients, self.shards_per_client, seed)


@checked(num_clients=Bounds(1))
@dataclass(frozen=True)
class Mutex(Partition):
    """One class per client, see :func:`mutex`."""

    num_clients: int

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Deals classes."""
        return partitions.mutex(labels, self.num_clients, seed)


@checked(groups=FILLED)
@dataclass(frozen=True)
class Unbalanced(Partition):
    """One client per group of classes, see :func:`unbalanced`. The default are FedMDFG's groups for ten classes."""

    groups: tuple[tuple[int, ...], ...] = ((0,), (1, 2), (3, 4, 5, 6), (7,), (8, 9))

    @property
    def num_clients(self) -> int:
        """One client per group."""
        return len(self.groups)

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Gives each client its group."""
        return partitions.unbalanced(labels, self.groups, seed)


@checked(keys=ANY)
@dataclass(frozen=True)
class ByKey(Partition):
    """One client per distinct key: owners, sites, domains.

    Keys are integers, strings, other plain numbers or tuples of them; entries of tensors and arrays are taken as such.
    They are also the clients' names in tables, records and messages.

    Args:
        keys: the name of an attribute of the training and evaluation datasets with one key per sample; or a function
            that takes such a dataset and returns them; or the keys of the training samples, and then evaluation data
            follows the clients' labels; or such keys per stage in a mapping with ``"train"`` and, as far as known,
            ``"val"`` and ``"test"``.
    """

    keys: str | Callable[[Any], Sequence[int | str]] | Sequence[int | str] | Mapping[str, Sequence[int | str]]

    def __post_init__(self) -> None:
        check("keys of ByKey", self.keys, str | Callable[..., Any] | Mapping[Any, Any] | Sequence[Any], FILLED)
        if callable(self.keys) or isinstance(self.keys, str):
            return
        if isinstance(self.keys, Mapping) and ("train" not in self.keys or set(self.keys) - {"train", "val", "test"}):
            raise ValueError(f"keys must have the entry 'train' and may have 'val', 'test', found {list(self.keys)}")

    def __repr__(self) -> str:
        if isinstance(self.keys, str):
            return f"ByKey({self.keys!r})"
        if callable(self.keys):
            return f"ByKey({getattr(self.keys, '__name__', type(self.keys).__name__)})"
        if isinstance(self.keys, Mapping):
            return f"ByKey({{{', '.join(f'{stage!r}: {len(keys)} keys' for stage, keys in self.keys.items())}}})"
        return f"ByKey({len(self.keys)} keys)"

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Divides by the keys; where ``keys`` asks a dataset for them, ``labels`` are taken for its answer."""
        if isinstance(self.keys, str) or callable(self.keys):
            return partitions.by_key(labels)
        return partitions.by_key(_of_length(_given(self.keys, "train") or [], len(labels)))

    def divide(self, samples: Samples, seed: int) -> list[Tensor]:
        """Divides by the keys of the samples' stage."""
        return partitions.by_key(self._keys_of(samples))

    def match(self, train: Samples, parts: Sequence[Tensor], samples: Samples, seed: int) -> list[Tensor]:
        """Gives evaluation samples to the client that has their key in training.

        Raises:
            ValueError: an evaluation key does not occur in training.
        """
        asks = isinstance(self.keys, str) or callable(self.keys)
        if not asks and _given(self.keys, samples.stage) is None:
            return super().match(train, parts, samples, seed)
        vectors, unknown = self.anew(train, samples, seed)
        if unknown:
            raise ValueError(
                f"keys of the {samples.stage} samples must occur in training, found also {', '.join(unknown[:10])}: "
                "evaluation='independent' evaluates them as clients of their own, with the global model"
            )
        return vectors

    def anew(self, train: Samples, samples: Samples, seed: int) -> tuple[list[Tensor], tuple[str, ...]]:
        """Gives evaluation samples to the client with their key; keys that training lacks are further clients."""
        known = partitions.distinct_keys(self._keys_of(train))
        keys = self._keys_of(samples)
        among = set(known)
        unknown = partitions.distinct_keys([key for key in keys if key not in among])
        client_of = {key: client for client, key in enumerate([*known, *unknown])}
        owner = np.array([client_of[key] for key in keys], dtype=np.int64)
        return partitions.parts_of(owner, len(client_of)), tuple(map(_name, unknown))

    def names(self, train: Samples) -> tuple[str, ...] | None:
        """The keys."""
        return tuple(map(_name, partitions.distinct_keys(self._keys_of(train))))

    def _keys_of(self, samples: Samples) -> list[Hashable]:
        if callable(self.keys):
            return _of_length(_plain(self.keys(samples.dataset)), len(samples))
        if isinstance(self.keys, str):
            return _plain(attribute_of(samples.dataset, self.keys))
        given = _given(self.keys, samples.stage)
        if given is None:
            raise ValueError(f"keys must be given for the {samples.stage} samples too, or as an attribute's name")
        return _of_length(given, len(samples))


def _given(keys: Any, stage: str) -> list[Hashable] | None:
    """The keys given for a stage, as plain Python values."""
    per_stage = keys if isinstance(keys, Mapping) else {"train": keys}
    found = per_stage.get(stage)
    return None if found is None else _plain(found)


def _plain(keys: Any) -> list[Hashable]:
    values = keys.tolist() if hasattr(keys, "tolist") else list(keys)
    plain = (int, str)
    return [v if type(v) in plain and v != "" else _plain_key(v, place) for place, v in enumerate(values)]


def _plain_key(value: Any, place: int) -> Hashable:
    if isinstance(value, (Tensor, np.generic, np.ndarray)):
        value = value.tolist()  # a Python number for a single one
    if isinstance(value, (list, tuple)):
        return tuple(_plain_key(item, place) for item in value)
    if value == "":
        raise ValueError(f"keys must not be empty, found '' at sample {place}: give it a name, or leave the sample out")
    if isinstance(value, float) and value != value:
        raise ValueError(f"keys must not be NaN, found it at sample {place}")
    if not isinstance(value, (int, float, str, bytes)):
        raise TypeError(
            f"keys must be integers, strings or tuples of them, found {type(value).__name__} at sample {place}: two "
            "objects are the same client only if they are equal"
        )
    return value


def _name(key: Any) -> str:
    return ", ".join(map(_name, key)) if isinstance(key, tuple) else str(key)


def _of_length(keys: list[Hashable], n: int) -> list[Hashable]:
    if len(keys) != n:
        raise ValueError(f"keys must hold one entry for each of the {n} samples, found {len(keys)}")
    return keys
