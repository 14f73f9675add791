# SPDX-License-Identifier: Apache-2.0
"""All clients' views of the data of one stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, default_collate, default_convert

from fl_lightning.arguments import ANY, Bounds, checked
from fl_lightning.core.records import numbered
from fl_lightning.core.seeding import derive_seed
from fl_lightning.core.tensors import digest
from fl_lightning.data.client_indices import ClientIndices, gathered, tensor_source
from fl_lightning.data.labels import labels_at_hand, num_samples


@checked(batch_size=Bounds(1), num_workers=Bounds(0), timeout=Bounds(0), prefetch_factor=Bounds(1))
@dataclass(frozen=True)
class LoaderSettings:
    """How a dataset is batched; the fields mean what they mean for ``torch.utils.data.DataLoader``.

    ``fetch_batches`` is for datasets that take a list of indices and return a whole batch, which ``DataLoader`` knows
    as ``sampler=BatchSampler(...), batch_size=None``. ``persistent_workers`` and ``generator`` are not kept: a worker
    that outlives a client, or a generator shared by all, would make a client's randomness depend on the clients before
    it.

    Raises:
        ValueError: ``batch_size`` is not positive.
    """

    batch_size: int = 32
    shuffle: bool = False
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] = default_collate
    num_workers: int = 0
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    timeout: float = 0.0
    multiprocessing_context: str | None = None
    prefetch_factor: int | None = None
    fetch_batches: bool = False


class ClientLoaders:
    """Hands out one client's batches at a time.

    A registered client costs 16 bytes and 8 bytes per sample. Data is loaded only when a client's batches are read.
    Batches of a ``TensorDataset`` (also behind ``Subset``) with the default collate function are gathered directly from
    its tensors. All other data goes through a ``DataLoader`` per call. Both ways give the same batches.

    ``drop_last`` applies with two exceptions. A client with fewer samples than one batch keeps its short batch, because
    it would otherwise train zero steps. If the caller sets ``batch_size``, no batch is dropped, because such a caller
    needs all samples.

    Args:
        dataset: a map-style dataset.
        parts: one vector of sample indices per client, or the indices in their compact form.
        stage: what the data is for.
        settings: how to batch it.

    Attributes:
        stage: what the data is for.
        dataset: the dataset of all clients.
        settings: how it is batched.
        sizes: ``[N]`` int64 samples per client.
        names: what people call the clients: keys of :class:`ByKey`, otherwise their numbers.
        num_trained: how many of the clients, from the first on, are clients of the training data.
        batch_size: samples per batch, unless a call says otherwise.

    Raises:
        ValueError: ``parts`` do not fit the dataset.
    """

    @checked(dataset=ANY, parts=ANY)
    def __init__(
        self,
        dataset: Dataset[Any],
        parts: ClientIndices | Sequence[Tensor] | Sequence[Sequence[int]],
        stage: Literal["train", "val", "test", "predict"] = "train",
        settings: LoaderSettings | None = None,
    ) -> None:
        total = num_samples(dataset)
        if settings is None:
            settings = LoaderSettings(shuffle=stage == "train")
        if not isinstance(parts, ClientIndices):
            parts = ClientIndices(parts, total)
        if parts.num_samples != total:
            raise ValueError(f"parts must be made for the dataset's {total} samples, found {parts.num_samples}")
        self.stage: Literal["train", "val", "test", "predict"] = stage
        self.dataset = dataset
        self.settings = settings
        self.sizes = parts.sizes
        self.names: Sequence[str] = numbered(len(parts)) if parts.names is None else parts.names
        self.num_trained = parts.num_trained
        self.batch_size = settings.batch_size
        self._parts = parts
        # Both ways of torch to make a batch of a tuple of tensors give the list that is gathered here.
        collates = settings.collate_fn is (default_convert if settings.fetch_batches else default_collate)
        self._source = tensor_source(dataset) if collates else None

    def numbered_from(self, first: int) -> ClientLoaders:
        """The same clients under the ids ``first``, ``first + 1`` and so on; :attr:`sizes` stays by place."""
        other = copy.copy(self)
        other._parts = self._parts.numbered_from(first)
        return other

    def alone(self, client_id: int, num_clients: int | None = None) -> ClientLoaders:
        """The client's data, and nothing of the others.

        Args:
            client_id: the client.
            num_clients: these are the data of the client alone, who is one of so many; ``None``: of all clients.
        """
        mine = self.indices(client_id if num_clients is None else 0)
        vectors = [mine if k == client_id else mine[:0] for k in range(num_clients or len(self._parts))]
        names = self._parts.names if num_clients is None else None
        parts = ClientIndices(vectors, self._parts.num_samples, names)
        return ClientLoaders(self.dataset, parts, self.stage, self.settings)

    def __len__(self) -> int:
        """Number of clients; of what a running fit shows, batches of a visit."""
        return len(self._parts)

    def __repr__(self) -> str:
        return f"ClientLoaders(stage={self.stage!r}, clients={len(self._parts)}, samples={int(self.sizes.sum())})"

    def __iter__(self) -> Iterator[Any]:
        # Lightning calls iter() on every loader before the strategy gets to see it: only taking a batch may fail.
        return map(_refuse, (self,))

    def indices(self, client_id: int) -> Tensor:
        """The client's samples: ``[n]`` int64 indices into the dataset, ascending; a view, not to be written.

        Raises:
            IndexError: there is no such client.
        """
        return self._parts[client_id]

    def fingerprint(self) -> dict[str, Any]:
        """What tells these data from others: sizes, whose samples are whose, and labels where no pass is needed.

        An unseeded split of a dataset shows in the places that its ``Subset`` takes, or in its labels.
        """
        found, dataset, places = self._parts.fingerprint(), self.dataset, list[Tensor]()
        while isinstance(dataset, Subset):
            places.append(torch.as_tensor(dataset.indices, dtype=torch.int64))
            dataset = dataset.dataset
        if places:
            found["subset of the dataset"] = digest(*places)
        labels = labels_at_hand(self.dataset)
        return found if labels is None else found | {"labels": digest(labels)}

    def num_batches(self, client_id: int, *, batch_size: int | None = None, merge_single: bool = False) -> int:
        """How many batches one call of :meth:`batches` gives; 0 for a client without data.

        Raises:
            IndexError: there is no such client.
            ValueError: ``batch_size`` is not positive.
        """
        return self.num_batches_of(len(self._parts[client_id]), batch_size=batch_size, merge_single=merge_single)

    def num_batches_of(self, samples: int, *, batch_size: int | None = None, merge_single: bool = False) -> int:
        """How many batches a client with so many samples has; see :meth:`num_batches`."""
        return len(self._cuts(samples, batch_size, merge_single)) - 1

    def batches(
        self, client_id: int, *, seed: int | None, batch_size: int | None = None, merge_single: bool = False
    ) -> Iterator[tuple[Any, int]]:
        """One pass over the client's data.

        Args:
            client_id: the client.
            seed: decides the order, if the loader shuffles, and the seeds of worker processes, and nothing else does;
                ``None`` keeps the order of the dataset.
            batch_size: samples per batch instead of the loader's; then ``drop_last`` does not apply.
            merge_single: join a last batch of one sample to the one before (BatchNorm cannot train on one sample).

        Yields:
            The collated batch and its number of samples.

        Raises:
            IndexError: there is no such client.
            ValueError: ``batch_size`` is not positive.
        """
        order = self._parts[client_id]
        if seed is not None and self.settings.shuffle:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))]
        cuts = self._cuts(len(order), batch_size, merge_single)
        if self._source is not None:
            return gathered(*self._source, order, cuts, self.settings.pin_memory)
        return self._load(order, cuts, derive_seed(0 if seed is None else seed, "workers"))

    @property
    def in_memory(self) -> bool:
        """Whether batches are gathered from tensors, without asking the dataset for its samples one by one."""
        return self._source is not None

    def _cuts(self, size: int, batch_size: int | None, merge_single: bool) -> list[int]:
        """Where batches begin, and the end of the last one."""
        step = self.batch_size if batch_size is None else batch_size
        if step < 1:
            raise ValueError(f"batch_size must be positive, found {step}")
        cuts = [*range(0, size, step), size]
        rest = size % step
        if len(cuts) > 2 and rest:
            if self.settings.drop_last and batch_size is None:
                cuts.pop()
            elif merge_single and rest == 1:
                del cuts[-2]
        return cuts

    def _load(self, order: Tensor, cuts: list[int], seed: int) -> Iterator[tuple[Any, int]]:
        if len(cuts) < 2:
            return
        indices, settings = order.tolist(), self.settings
        chunks = [indices[start:stop] for start, stop in pairwise(cuts)]
        # A sampler of lists without batch_size hands each list to the dataset, as the user's BatchSampler does.
        how: dict[str, Any] = (
            {"sampler": chunks, "batch_size": None} if settings.fetch_batches else {"batch_sampler": chunks}
        )
        loader = DataLoader(
            self.dataset,
            **how,
            collate_fn=settings.collate_fn,
            num_workers=settings.num_workers,
            pin_memory=settings.pin_memory,
            worker_init_fn=settings.worker_init_fn,
            timeout=settings.timeout,
            multiprocessing_context=settings.multiprocessing_context,
            prefetch_factor=settings.prefetch_factor,
            generator=torch.Generator().manual_seed(seed),
        )
        done = 0
        for batch, chosen in zip(loader, chunks, strict=False):
            yield batch, len(chosen)
            done += 1
        if done < len(chunks):
            raise RuntimeError(
                f"{type(self.dataset).__name__}, or what it reads from, must raise IndexError where no sample is, "
                f"found StopIteration in batch {done + 1} of {len(chunks)}"
            )


class VisitLoader(ClientLoaders):
    """The same loaders, as long as a client's visit: by their length modules count the steps of their schedules."""

    def __init__(self, loaders: ClientLoaders, batches: Callable[[ClientLoaders], int]) -> None:
        vars(self).update(vars(loaders))
        self.loaders, self._count = loaders, batches

    def __len__(self) -> int:
        """Batches of a visit over all local epochs: ``trainer.num_training_batches``, but for the trainer's limits."""
        return self._count(self.loaders)


def limited(limit: int | float, available: int) -> int:
    """How many of a client's ``available`` batches a limit leaves: a count, or a fraction that leaves at least one."""
    if isinstance(limit, int):
        return min(limit, available)
    return min(max(1, int(limit * available)), available)


def _refuse(loaders: ClientLoaders) -> Any:
    raise TypeError(
        f"{loaders!r} holds the batches of many clients and has no order of its own: train it with "
        "Trainer(strategy=FederatedStrategy(...)), whose training_step gets each batch, or take one client's data with "
        "batches(client_id, seed=...)"
    )
