# SPDX-License-Identifier: Apache-2.0
"""Batches: what Lightning's loops take for one, how it gets into a step, and the loss that comes back.

In training a loop takes a client for a batch (:class:`ClientTask`), in an evaluation a batch with a tag.

Lightning may fetch batches ahead of the step that uses them. What a loader of an evaluation knows when it gives out a
batch must therefore travel with the batch. The tag comes off where Lightning's evaluation loop turns from fetching to
hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.core.modules import shadowed
from fl_lightning.lightning.inspection import is_overridden, takes_batch_index
from fl_lightning.lightning.names import Trainer, TrainerFn, lightning_module

if TYPE_CHECKING:
    from lightning.pytorch.trainer import call
else:
    call = lightning_module("trainer.call")


@dataclass(frozen=True)
class ClientTask:
    """What callbacks see as a "batch": one client of the round."""

    client_id: int | None  # None for an empty place
    index: int  # place in the cohort
    round: int
    num_samples: int = 0  # of the client's training data
    num_batches: int = 0  # of one local epoch

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, key: object) -> Any:
        raise TypeError(_no_batch(f"batch[{key!r}]"))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name if name.startswith("__") else _no_batch(f"batch.{name}"))


def _no_batch(use: str) -> str:
    return (
        "callbacks run on the server, where what Lightning calls a batch is the training of one client (a ClientTask "
        f"with client_id, num_samples and num_batches), found {use}: read batches in the module's own hooks, such as "
        "on_train_batch_start, which run for every local batch"
    )


@dataclass(frozen=True)
class ClientBatch:
    """A batch and whose it is."""

    client_id: int
    index: int  # among the client's batches
    num_samples: int
    batch: Any  # what the user's loader gave
    source: object  # the loader that tagged it
    place: int | None = None  # among all clients' batches, if other processes have some; None: as counted here


Numbers = tuple[int, Sequence[int]] | None
"""``batch_idx``, and how many batches of each loader there are, as ``trainer.num_val_batches`` says."""


@contextmanager
def untagged_batches(
    trainer: Trainer,
    stage: str,
    before: Callable[[], None],
    around: Callable[[list[ClientBatch]], AbstractContextManager[Numbers]],
    after: Callable[[], None],
) -> Iterator[None]:
    """Takes the tags off all batches of the running evaluation before any hook sees them.

    ``before`` is called before the first batch, with a tag or without. ``around`` is entered with the tags before the
    first hook of a batch, and left after the last; it gives the numbers for the module's step and hooks of batches,
    where callbacks have others. ``after`` is called when a loader is over, before Lightning reads what was logged.
    """
    loop, module = _evaluation_loop(trainer), trainer.lightning_module
    evaluation_step, store_outputs, begun = loop._evaluation_step, loop._store_dataloader_outputs, False
    numbers: Numbers = None

    def step(batch: Any, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        nonlocal begun, numbers
        if not begun:
            begun = True
            before()
        tags = list(_tags(batch))
        if tags:
            batch = apply_to_collection(batch, ClientBatch, attrgetter("batch"))
            batch_idx = batch_idx if tags[0].place is None else tags[0].place
        with around(tags) as numbers:
            evaluation_step(batch, batch_idx, *args, **kwargs)

    def store() -> None:
        after()
        store_outputs()

    def told(method: Callable[..., Any], at: int) -> Callable[..., Any]:
        @wraps(method)  # Lightning looks at its arguments
        def call_told(*args: Any, **kwargs: Any) -> Any:
            if numbers is None:
                return method(*args, **kwargs)
            with counted_batches(trainer, numbers[1]):
                return method(*args[:at], *(numbers[0], *args[at + 1 :])[: len(args) - at], **kwargs)

        return call_told

    names = {f"{stage}_step": 1, f"on_{stage}_batch_start": 1, f"on_{stage}_batch_end": 2}
    own = {name: told(getattr(module, name), at) for name, at in names.items() if is_overridden(name, module)}
    loop._evaluation_step, loop._store_dataloader_outputs = step, store
    try:
        with shadowed(module, **own):
            yield
    finally:
        del loop._evaluation_step, loop._store_dataloader_outputs


@contextmanager
def counted_batches(trainer: Trainer, counts: Sequence[int]) -> Iterator[None]:
    """``trainer.num_val_batches`` and ``num_test_batches`` say how many batches one client has of each loader."""
    loop = _evaluation_loop(trainer)
    before, loop._max_batches = loop._max_batches, list(counts)
    try:
        yield
    finally:
        loop._max_batches = before


def run_batch(trainer: Trainer, stage: str, batch: Any, index: int) -> None:
    """One evaluation step with the module's own hooks around it, whose logs go to the results that collect."""
    results: Any = trainer._results
    batch = device_batch(trainer, batch, results.dataloader_idx or 0)
    results.batch, results.batch_size = batch, None
    told = (index,) if results.dataloader_idx is None else (index, results.dataloader_idx)
    takes_index = takes_batch_index(getattr(trainer.lightning_module, f"{stage}_step"))
    call._call_lightning_module_hook(trainer, f"on_{stage}_batch_start", batch, *told)
    output = call._call_strategy_hook(trainer, f"{stage}_step", batch, *told[0 if takes_index else 1 :])
    call._call_lightning_module_hook(trainer, f"on_{stage}_batch_end", output, batch, *told)
    results.batch = None


def run_hook(trainer: Trainer, name: str) -> None:
    """One of the module's hooks, as Lightning calls it."""
    call._call_lightning_module_hook(trainer, name)


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


def move_to_device(trainer: Trainer, batch: Any, loader: int = 0) -> Any:
    """The batch of a loader after the transfer hooks of the module or the data module, on the device."""
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=loader)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=loader)


def device_batch(trainer: Trainer, batch: Any, loader: int = 0) -> Any:
    """The batch as a step of the module takes it: in the trainer's precision, after the hooks, on the device."""
    return move_to_device(trainer, trainer.precision_plugin.convert_input(batch), loader)


def batch_size(batch: Any) -> int:
    """How much a batch weighs in ``self.log``, where nobody says it: Lightning's own guess."""
    return int(lightning_module("utilities.data").extract_batch_size(batch))


def nbytes_of(batch: Any) -> int:
    """Bytes of the tensors in a batch."""
    found = list[int]()
    apply_to_collection(batch, Tensor, lambda tensor: found.append(tensor.nbytes))
    return sum(found)


def loss_of(output: Any) -> Tensor | None:
    """The loss in what ``training_step`` returned; ``None`` if the step wants this batch skipped.

    What else it returns is Lightning's own MisconfigurationException, which modules with hooks get from Lightning
    itself.
    """
    # Tensors first: this runs for every local batch.
    if isinstance(output, Tensor) or output is None:
        return output
    found = type(output).__name__
    if isinstance(output, Mapping):
        loss = output.get("loss")
        if isinstance(loss, Tensor):
            return loss
        found = f"a dict with {sorted(map(str, output))}" if loss is None else f"{type(loss).__name__} as 'loss'"
    error: type[Exception] = lightning_module("utilities.exceptions").MisconfigurationException
    raise error(
        "training_step must return a tensor, a dict with the loss as 'loss', or None to skip the batch, where "
        f"optimization is automatic, found {found}"
    )
