# SPDX-License-Identifier: Apache-2.0
"""Evaluation batches that carry their client through Lightning's data fetchers.

Lightning may fetch batches ahead of the step that uses them. What a loader knows when it gives out a batch must
therefore travel with the batch. The tag comes off where Lightning's evaluation loop turns from fetching to hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection

from fl_lightning.lightning.names import Trainer, TrainerFn


@dataclass(frozen=True)
class ClientBatch:
    """A batch and whose it is."""

    client_id: int
    is_first: bool  # of the client's batches
    is_last: bool
    num_samples: int
    batch: Any  # what the user's loader gave
    source: object  # the loader that tagged it
    index: int | None = None  # among all clients' batches, if other processes have some; None: as counted here


@contextmanager
def untagged_batches(
    trainer: Trainer, before: Callable[[], None], around: Callable[[ClientBatch], AbstractContextManager[None]]
) -> Iterator[None]:
    """Takes the tags off all batches of the running evaluation before any hook sees them.

    ``before`` is called before each batch, with a tag or without. ``around`` is entered with the tag before the first
    hook of a batch, and left after the last.
    """
    loop = _evaluation_loop(trainer)
    evaluation_step = loop._evaluation_step

    def step(batch: Any, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        before()
        tags = list(_tags(batch))
        if tags:
            batch = apply_to_collection(batch, ClientBatch, attrgetter("batch"))
            batch_idx = batch_idx if tags[0].index is None else tags[0].index
        with ExitStack() as stack:
            for tag in tags:
                stack.enter_context(around(tag))
            evaluation_step(batch, batch_idx, *args, **kwargs)

    loop._evaluation_step = step
    try:
        yield
    finally:
        del loop._evaluation_step


@contextmanager
def counted_batches(trainer: Trainer, counts: Sequence[int]) -> Iterator[None]:
    """``trainer.num_val_batches`` and ``num_test_batches`` say how many batches one client has of each loader."""
    loop = _evaluation_loop(trainer)
    before, loop._max_batches = loop._max_batches, list(counts)
    try:
        yield
    finally:
        loop._max_batches = before


def num_loaders(trainer: Trainer) -> int:
    """How many loaders the running evaluation walks over."""
    return len(_evaluation_loop(trainer)._max_batches)


def walked_loaders(trainer: Trainer) -> tuple[list[object], bool]:
    """The loaders of the running evaluation, and whether it walks over one after the other, not side by side."""
    loop = _evaluation_loop(trainer)
    return list(loop._combined_loader.flattened), bool(loop._is_sequential)


def _evaluation_loop(trainer: Trainer) -> Any:
    if trainer.testing:
        return trainer.test_loop
    fitting = trainer.state.fn == TrainerFn.FITTING
    return trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop


def _tags(batch: Any) -> Iterator[ClientBatch]:
    """The tags in a batch: several where a ``CombinedLoader`` gives the batches of its loaders side by side."""
    if isinstance(batch, ClientBatch):
        yield batch
    elif isinstance(batch, (list, tuple, Mapping)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tags(part)
