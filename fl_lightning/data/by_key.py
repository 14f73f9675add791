# SPDX-License-Identifier: Apache-2.0
"""Clients that the data name: owners, sites, domains."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.arguments import ANY, FILLED, check, checked
from fl_lightning.data.client_indices import parts_of
from fl_lightning.data.labels import Samples, attribute_of
from fl_lightning.data.partitions import Partition, check_clients


@checked(keys=ANY)
@dataclass(frozen=True)
class ByKey(Partition):
    """One client per distinct key: owners, sites, domains.

    Keys are integers, strings, other plain numbers or tuples of them; entries of tensors and arrays are taken as such.
    They are also the clients' names in tables, records and messages.

    Args:
        keys: the name of an attribute of the training and evaluation datasets with one key per sample; or a function
            that takes such a dataset and returns them; or the keys of the training samples; or such keys per stage in a
            mapping with ``"train"`` and, as far as there are such data, ``"val"`` and ``"test"``.
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
            return _parts(labels.tolist())
        return _parts(_of_length(_given(self.keys, "train") or [], len(labels)))

    def divide(self, samples: Samples, seed: int) -> list[Tensor]:
        """Divides by the keys of the samples' stage."""
        return _parts(self._keys_of(samples))

    def match(self, train: Samples, parts: Sequence[Tensor], samples: Samples, seed: int) -> list[Tensor]:
        """Gives evaluation samples to the client that has their key in training.

        Raises:
            ValueError: the evaluation samples have no keys, or one that does not occur in training.
        """
        vectors, unknown = self.anew(train, samples, seed)
        if unknown:
            raise ValueError(
                f"keys of the {samples.stage} samples must occur in training, found also {', '.join(unknown[:10])}: "
                "evaluation='independent' evaluates them as clients of their own, with the global model"
            )
        return vectors

    def anew(self, train: Samples, samples: Samples, seed: int) -> tuple[list[Tensor], tuple[str, ...]]:
        """Gives evaluation samples to the client with their key; keys that training lacks are further clients."""
        known = distinct_keys(self._keys_of(train))
        keys = self._keys_of(samples)
        among = set(known)
        unknown = distinct_keys([key for key in keys if key not in among])
        return _by_key(keys, [*known, *unknown]), tuple(map(_name, unknown))

    def names(self, train: Samples) -> tuple[str, ...] | None:
        """The keys."""
        return tuple(map(_name, distinct_keys(self._keys_of(train))))

    def _keys_of(self, samples: Samples) -> list[Hashable]:
        if callable(self.keys):
            return _of_length(_plain(self.keys(samples.dataset)), len(samples))
        if isinstance(self.keys, str):
            return _plain(attribute_of(samples.dataset, self.keys))
        given = _given(self.keys, samples.stage)
        if given is None:
            raise ValueError(
                f"keys of ByKey must say whose the {samples.stage} samples are, found those of the training samples: "
                f"pass {{'train': [...], '{samples.stage}': [...]}} or the name of an attribute, or evaluate every "
                "client on all of them with evaluation='shared'"
            )
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


def _parts(keys: Sequence[Hashable]) -> list[Tensor]:
    order = distinct_keys(keys)
    check_clients(len(order), len(keys))
    return _by_key(keys, order)


def _by_key(keys: Sequence[Hashable], order: Sequence[Hashable]) -> list[Tensor]:
    """The samples of each key of ``order``, from the key of each sample."""
    client_of = {key: client for client, key in enumerate(order)}
    return parts_of(np.array([client_of[key] for key in keys], dtype=np.int64), len(order))


def distinct_keys(keys: Sequence[Hashable]) -> list[Any]:
    """The distinct keys in ascending order; in order of first appearance if they cannot be compared."""
    seen: list[Any] = list(dict.fromkeys(keys))
    try:
        return sorted(seen)
    except TypeError:
        return seen
