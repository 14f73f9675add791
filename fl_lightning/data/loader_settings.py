# SPDX-License-Identifier: Apache-2.0
"""What is kept of a user's DataLoader, and which DataLoaders cannot be divided among clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from fl_lightning.arguments import Bounds, checked
from fl_lightning.data.labels import num_samples

ONE_DATASET = (
    "clients are formed from a single dataset, so join several with ConcatDataset; several to evaluate come in a list "
    "from val_dataloader or test_dataloader of a LightningDataModule"
)
"""What to do with several loaders, as the end of an error."""


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

    @classmethod
    @checked()
    def from_dataloader(cls, loader: object, name: str = "loader") -> LoaderSettings:
        """Reads the settings of a DataLoader whose samples can be divided among clients.

        Args:
            loader: a ``DataLoader`` over a map-style dataset that visits every sample once, in order or shuffled.
            name: what to call it in errors.

        Raises:
            TypeError: it is not a DataLoader, has an iteration of its own, or its dataset has no length or indices.
            ValueError: its batches or samples are chosen by something else than plain sequential or random order.
        """
        if not isinstance(loader, DataLoader):
            raise TypeError(f"{name} must be one torch DataLoader, found {type(loader).__name__}: {ONE_DATASET}")
        kind = type(loader)
        if kind.__iter__ is not DataLoader.__iter__:
            raise TypeError(
                f"{name} must iterate as DataLoader does, found {kind.__name__} with an __iter__ of its own: put what "
                "it does into the dataset or collate_fn"
            )
        if isinstance(loader.dataset, IterableDataset):
            raise TypeError(
                f"{name} must have a map-style dataset, found the IterableDataset {type(loader.dataset).__name__}: "
                "clients need samples that can be picked by index"
            )
        total = num_samples(loader.dataset)
        fetch_batches = loader.batch_sampler is None
        batches: object = loader.sampler if fetch_batches else loader.batch_sampler
        if fetch_batches and type(batches) is not BatchSampler:
            raise ValueError(
                f"{name} must form batches, found batch_size=None and the sampler {type(batches).__name__}: give it a "
                "batch_size, or as its sampler a BatchSampler over a SequentialSampler or RandomSampler"
            )
        if type(batches) is not BatchSampler:
            raise ValueError(
                f"{name} must use batch_size=, found the custom batch sampler {type(batches).__name__}: each client's "
                "batches are drawn from its own samples, which a BatchSampler over a SequentialSampler or "
                "RandomSampler allows"
            )
        context = loader.multiprocessing_context
        return cls(
            batch_size=int(batches.batch_size),
            shuffle=_shuffles(batches.sampler, total, name),
            drop_last=bool(batches.drop_last),
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            timeout=loader.timeout,
            # A context cannot be pickled, its name can.
            multiprocessing_context=None if context is None else str(context.get_start_method()),
            prefetch_factor=loader.prefetch_factor,
            fetch_batches=fetch_batches,
        )


def _shuffles(sampler: object, total: int, name: str) -> bool:
    if not isinstance(sampler, Sampler) or type(sampler) not in (SequentialSampler, RandomSampler):
        raise ValueError(
            f"{name} must visit its samples in order or with shuffle=True, found the sampler {type(sampler).__name__}: "
            "choose samples with torch.utils.data.Subset instead"
        )
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        raise ValueError(f"{name} must draw without replacement, found RandomSampler(replacement=True)")
    visited = sampler.num_samples if isinstance(sampler, RandomSampler) else len(sampler)  # type: ignore[arg-type]
    if visited != total:
        raise ValueError(
            f"{name} must visit all {total} samples of its dataset once per epoch, found a {type(sampler).__name__} "
            f"of {visited}: choose samples with torch.utils.data.Subset instead"
        )
    return isinstance(sampler, RandomSampler)
