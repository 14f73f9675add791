# SPDX-License-Identifier: Apache-2.0
"""From the client of each sample to the samples of each client, and what else partitions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.seeding import derive_seed
from fl_lightning.data.labels import integer_vector

Ints = np.ndarray[Any, np.dtype[np.int64]]


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
