# SPDX-License-Identifier: Apache-2.0
"""Which samples belong to which client, at eight bytes per sample; and their batches, where samples lie in tensors."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from fl_lightning.arguments import ANY, Bounds, check, checked
from fl_lightning.core.records import NAME
from fl_lightning.core.seeding import derive_seed
from fl_lightning.core.tensors import digest
from fl_lightning.data.labels import integer_vector

Ints = np.ndarray[Any, np.dtype[np.int64]]

_CHUNK_BYTES = 16 * 2**20
"""Tensors are gathered for as many batches at once as fit in here: one gather is cheaper than one per batch."""
_SAMPLES = ("__getitem__", "__getitems__", "__len__", "__getattribute__")


class ClientIndices:
    """The index lists of all clients in one int64 tensor; what clients get are views of it.

    Args:
        parts: one vector of sample indices per client; empty ones are allowed.
        num_samples: size of the dataset that the indices point into.
        names: what people call the clients; their numbers if left out.
        num_trained: how many of them, from the first on, are clients of the training data; default all.

    Attributes:
        sizes: ``[N]`` int64 samples per client.
        num_samples: size of the dataset that the indices point into.
        names: what people call the clients; ``None`` if they have numbers only.
        num_trained: how many of them, from the first on, are clients of the training data.

    Raises:
        ValueError: there is no client, an index is not an integer below ``num_samples``, a sample occurs twice, or
            there is not one name per client.
    """

    @checked(parts=ANY, num_samples=Bounds(0), num_trained=Bounds(0))
    def __init__(
        self,
        parts: Sequence[Tensor] | Sequence[Sequence[int]],
        num_samples: int,
        names: tuple[str, ...] | None = None,
        num_trained: int | None = None,
    ) -> None:
        check("parts of ClientIndices", parts, Sequence[Any])
        if len(parts) == 0:
            raise ValueError(f"parts of ClientIndices must hold at least one client, found {parts}")
        _check_names(names, len(parts))
        self.names = names
        self.num_trained = len(parts) if num_trained is None else num_trained
        vectors = [integer_vector(f"parts[{k}]", part, flags=False).cpu() for k, part in enumerate(parts)]
        self.sizes = torch.tensor([len(vector) for vector in vectors], dtype=torch.int64)
        self._flat = torch.cat(vectors)
        self._starts = self.sizes.cumsum(0) - self.sizes
        self.num_samples, self._first = num_samples, 0
        if self._flat.numel():
            low, high = int(self._flat.min()), int(self._flat.max())
            if low < 0 or high >= num_samples:
                raise ValueError(
                    f"parts must hold indices of the dataset's {num_samples} samples, found {low} to {high}"
                )
        seen = torch.bincount(self._flat, minlength=num_samples)
        if num_samples and int(seen.max()) > 1:
            raise ValueError(f"parts must hold each sample at most once, found sample {int(seen.argmax())} twice")

    @classmethod
    @checked(num_samples=Bounds(0), num_clients=Bounds(1))
    def shared(cls, num_samples: int, num_clients: int, names: tuple[str, ...] | None = None) -> ClientIndices:
        """Every client has the whole dataset; the indices are stored once."""
        _check_names(names, num_clients)
        whole = cls([torch.arange(num_samples)], num_samples)
        whole.names, whole.num_trained = names, num_clients
        whole.sizes = whole.sizes.repeat(num_clients)
        whole._starts = whole._starts.repeat(num_clients)
        return whole

    def numbered_from(self, first: int) -> ClientIndices:
        """The same clients under the ids ``first``, ``first + 1`` and so on."""
        other = copy.copy(self)
        other._first = first
        return other

    @property
    def num_used(self) -> int:
        """How many of the dataset's samples belong to a client."""
        return self._flat.numel()

    def __len__(self) -> int:
        return self.sizes.numel()

    def __getitem__(self, client_id: int) -> Tensor:
        place, last = client_id - self._first, self._first + len(self) - 1
        if not 0 <= place < len(self):
            raise IndexError(f"client_id must lie between {self._first} and {last}, found {client_id}")
        start = int(self._starts[place])
        return self._flat[start : start + int(self.sizes[place])]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[self._first + place] for place in range(len(self)))

    def fingerprint(self) -> dict[str, Any]:
        """The number of samples in use, and digests of the clients' sizes and of whose samples are whose."""
        sizes, shared = digest(self.sizes), digest(self._starts, self._flat)
        return {"samples": self.num_used, "sizes of the clients": sizes, "samples of the clients": shared}

    def summary(self) -> str:
        """One sentence about the clients' sizes."""
        return (
            f"{len(self)} clients with {int(self.sizes.min())} to {int(self.sizes.max())} training samples each "
            f"(median {float(self.sizes.double().quantile(0.5)):g}, together {self.num_used} of {self.num_samples})."
        )

    def hold_out(self, fraction: float, seed: int) -> tuple[ClientIndices, ClientIndices]:
        """Splits every client's samples at random.

        A client of ``n`` samples gives away ``round(fraction * n)``, but keeps at least one and, if it has two or more,
        gives at least one.

        Args:
            fraction: share to set aside, between 0 and 1.
            seed: client ``i`` draws with a seed of its own.

        Returns:
            What the clients keep, and what is set aside.
        """
        rest, aside = [], []
        for client_id, part in enumerate(self):
            n = len(part)
            count = min(max(round(fraction * n), 1), n - 1) if n > 1 else 0
            generator = torch.Generator().manual_seed(derive_seed(seed, "holdout", client_id))
            order = torch.randperm(n, generator=generator)
            aside.append(part[order[:count].sort().values])
            rest.append(part[order[count:].sort().values])
        return ClientIndices(rest, self.num_samples, self.names), ClientIndices(aside, self.num_samples, self.names)


def _check_names(names: tuple[str, ...] | None, clients: int) -> None:
    """Refuses names that tables cannot hold, and those of which two are alike: they would be taken for one client."""
    if names is None:
        return
    if len(names) != clients:
        raise ValueError(f"names must name each of the {clients} clients, found {len(names)} names")
    if len(set(names)) < clients:
        name, count = Counter(names).most_common(1)[0]
        raise ValueError(f"names must tell the clients apart, found {count} clients called {name!r}")
    odd = [name for name in names if not NAME.admits(name)]
    if odd:
        raise ValueError(f"names of clients, and keys that become names, must have {NAME.wanted}, found {odd[0]!r}")


def parts_of(owner: Ints, num_clients: int) -> list[Tensor]:
    """The samples of each client, from the client of each sample ``[n]``."""
    flat = torch.from_numpy(np.argsort(owner, kind="stable"))
    return list(torch.split(flat, np.bincount(owner, minlength=num_clients).tolist()))


def tensor_source(dataset: Dataset[Any]) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """The tensors behind a dataset and where its samples lie in them; ``None`` if samples must be asked one by one."""
    rows: Tensor | None = None
    while isinstance(dataset, Subset) and _gives_what(dataset, Subset):
        outer = torch.as_tensor(dataset.indices, dtype=torch.int64)
        rows = outer if rows is None else outer[rows]
        dataset = dataset.dataset
    if not (isinstance(dataset, TensorDataset) and _gives_what(dataset, TensorDataset)):
        return None
    if any(type(tensor) is not Tensor or tensor.layout != torch.strided for tensor in dataset.tensors):
        return None
    return dataset.tensors, rows


def _gives_what(dataset: Dataset[Any], kind: type) -> bool:
    """Whether a sample of a dataset is what ``kind`` makes of it, also where the dataset is of a subclass."""
    own = [name for name in _SAMPLES if getattr(type(dataset), name, None) is not getattr(kind, name, None)]
    return not own and not any(name in vars(dataset) for name in _SAMPLES)


def gathered(
    tensors: tuple[Tensor, ...], rows: Tensor | None, order: Tensor, cuts: list[int], pin: bool
) -> Iterator[tuple[Any, int]]:
    """Batches of these tensors and their sizes: the samples of ``order``, which ``rows`` places, cut at ``cuts``."""
    if rows is not None:
        order = rows[order]
    sizes = [stop - start for start, stop in pairwise(cuts)]
    if not sizes:
        return
    sample_bytes = sum(tensor.nbytes // max(len(tensor), 1) for tensor in tensors)
    group = max(1, _CHUNK_BYTES // max(sample_bytes * max(sizes), 1))
    for first in range(0, len(sizes), group):
        some = sizes[first : first + group]
        chosen = order[cuts[first] : cuts[first] + sum(some)]
        columns = [tensor.index_select(0, chosen.to(tensor.device)) for tensor in tensors]
        if pin and torch.cuda.is_available():
            columns = [column if column.is_cuda else column.pin_memory() for column in columns]
        # Not views of one another for autograd: changing a batch in place leaves the other batches alone.
        pieces = [torch.unsafe_split_with_sizes(column, some) for column in columns]
        yield from zip(map(list, zip(*pieces, strict=True)), some, strict=True)
