# SPDX-License-Identifier: Apache-2.0
"""A client's batches: those that it trains on, in which order, and what the module makes of all of them, unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from math import ceil, inf, nan
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.attacks import Attack
from fl_lightning.algorithms.records import Needs
from fl_lightning.clients.module_isolation import ModuleIsolation
from fl_lightning.core.modules import BatchNorm
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data.client_loaders import ClientLoaders, limited
from fl_lightning.lightning.batches import loss_of, move_to_device, nbytes_of
from fl_lightning.lightning.inspection import takes_batch_index, transfer_is_hooked
from fl_lightning.lightning.names import LightningModule, Trainer
from fl_lightning.lightning.round_clock import MeanVisit

MAX_FACTOR = 8
"""A forward pass without gradients over so many training batches needs about as much memory as one in training."""
_BYTES = 2**22
_BYTES_ON_CPU = 2**19
"""Of the input of a pass. Where one is larger, arithmetic takes the time, and nothing is gained."""
_ROUNDING = 1e-5
"""The same means differ by less, relative to the values of single batches."""
_SPREAD = 1e-3
"""Values of batches that differ by less cannot tell what their mean is weighted by."""


@dataclass(frozen=True)
class LocalOptions:
    """Those arguments of :class:`fl_lightning.FederatedStrategy` that local training reads itself."""

    seed: int
    local_epochs: int
    local_steps: int | None
    client_optimizer_state: Literal["reset", "keep"]
    loss_batch_size: int | Literal["training"] | None
    attack: Attack | None

    @property
    def keeps_optimizer(self) -> bool:
        """Whether clients get their optimizer's state of their last round back."""
        return self.client_optimizer_state == "keep"

    def attack_of(self, client: int) -> Attack | None:
        """What this client does instead of what it should; ``None`` if it is honest."""
        return self.attack if self.attack is not None and client in self.attack.clients else None


class ClientBatches:
    """The batches of every client's local training, from (seed, round, client) alone.

    A pass has ``limit`` batches: a count, or a fraction of the client's batches (at least one). An optimizer step has
    ``window`` of them (``accumulate_grad_batches``).
    """

    def __init__(
        self, loaders: ClientLoaders, options: LocalOptions, limit: int | float, window: int, module: nn.Module
    ) -> None:
        self.loaders, self._options, self.limit, self.window = loaders, options, limit, window
        # BatchNorm cannot train on one sample: a last batch of one joins the one before.
        self.merges = any(isinstance(m, BatchNorm) for m in module.modules())

    def in_training(self, client: int, round: int) -> Iterator[tuple[Any, int, int, bool, bool]]:  # noqa: A002
        """Yields a batch, its samples, its place in its pass, and whether the pass and the visit end with it."""
        passes = list(self.passes(client, round))
        left = sum(take for _, take in passes)
        for seed, take in passes:
            batches = self.loaders.batches(client, seed=seed, merge_single=self.merges)
            for index, (batch, size) in enumerate(self._seen(client, islice(batches, take))):
                left -= 1
                yield batch, size, index, index + 1 == take, left == 0

    def passes(self, client: int, round: int) -> Iterator[tuple[int, int]]:  # noqa: A002
        """Passes over a client's data in local training: the seed of each one's order, and its number of batches."""
        for number, take in enumerate(self._takes(self.loaders.num_batches(client, merge_single=self.merges))):
            yield derive_seed(self._options.seed, "shuffle", round, client, number), take

    def _takes(self, available: int) -> Iterator[int]:
        """Batches of each pass of a client that has ``available`` ones."""
        options, window = self._options, self.window
        per_pass = limited(self.limit, available)
        wanted, number = options.local_steps, 0
        while per_pass > 0 and (number < options.local_epochs if wanted is None else wanted > 0):
            take = per_pass if wanted is None else min(per_pass, wanted * window)
            yield take
            if wanted is not None:
                wanted -= ceil(take / window)  # a pass ends with a step
            number += 1

    def expected_steps(self, client: int) -> int:
        """Optimizer steps that a client is going to take, if the module optimizes automatically and to the end."""
        available = self.loaders.num_batches(client, merge_single=self.merges)
        return sum(ceil(take / self.window) for take in self._takes(available))

    def mean_visit(self, full_gradients: bool) -> MeanVisit:
        """The mean visit, by which the fit's clock counts."""
        total = passes = batches = steps = 0
        sizes, counts = torch.unique(self.loaders.sizes, return_counts=True)
        for samples, clients in zip(sizes.tolist(), counts.tolist(), strict=True):
            available = self.loaders.num_batches_of(samples, merge_single=self.merges)
            takes = [available] * (available > 0) if full_gradients else list(self._takes(available))
            if takes:
                total += clients
                passes += clients * max(takes)
                batches += clients * sum(takes)
                steps += clients * (1 if full_gradients else sum(ceil(take / self.window) for take in takes))
        steps, batches, passes = (max(1, -(-number // max(total, 1))) for number in (steps, batches, passes))
        return MeanVisit(steps, batches, passes, self.window)

    def in_order(self, client: int, batch_size: int | None = None) -> Iterator[tuple[Any, int]]:
        """One pass over all of the client's training data in the dataset's order: batches and their samples.

        Without a ``batch_size`` batches are as in training; ``drop_last`` does not apply to a size of one's own.
        """
        size = batch_size or self.loaders.batch_size
        whole = self.loaders.batches(client, seed=None, batch_size=size, merge_single=self.merges)
        for batch, samples in self._seen(client, whole):
            if batch is None:
                raise ValueError(
                    f"collate_fn must return a batch of all samples of client {client} where losses or gradients of "
                    "all its data are needed, found None"
                )
            yield batch, samples

    def _seen(self, client: int, batches: Iterable[tuple[Any, int]]) -> Iterator[tuple[Any, int]]:
        """Batches as the client takes them, which a dishonest one may change."""
        attack = self._options.attack_of(client)
        return iter(batches) if attack is None else ((attack.change_batch(batch), size) for batch, size in batches)


class ModuleCalls:
    """Calls ``training_step`` as Lightning does."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.precision = trainer, trainer.precision_plugin
        self.module: LightningModule = trainer.lightning_module
        self.unseen = ModuleIsolation(self.module).unseen  # runs it without a trace
        self.hooked = transfer_is_hooked(trainer)  # hooks see batches on their way to the device
        self._takes_index = takes_batch_index(self.module.training_step)
        self._stays = not self.hooked and trainer.strategy.root_device.type == "cpu"

    def to_device(self, batch: Any) -> Any:
        """The batch as the module takes it: after the transfer hooks, on the device."""
        return batch if self._stays else move_to_device(self._trainer, batch)

    def converted(self, batch: Any) -> Any:
        """The batch in the trainer's precision, on the device."""
        return self.to_device(self.precision.convert_input(batch))

    def training_output(self, batch: Any, index: int) -> Any:
        """What ``training_step`` returns."""
        return self.module.training_step(batch, index) if self._takes_index else self.module.training_step(batch)

    def training_loss(self, batch: Any, index: int) -> Tensor | None:
        """The loss of ``training_step``; ``None`` if it skips the batch."""
        output = self.training_output(batch, index)
        return output if isinstance(output, Tensor) else loss_of(output)

    def unlogged_loss(self, batch: Any, index: int) -> Tensor:
        """The module's loss of a batch as it is at the moment; nothing is logged and metrics stay as they are."""
        with self.unseen(evaluate=False), self.precision.train_step_context():
            loss = loss_of(self.training_output(batch, index))
        if loss is None:
            raise ValueError("training_step must return a loss for every batch for this method, found None")
        return loss


@dataclass
class _Mean:
    """Of values of batches, weighted by samples; the smallest and the largest of them."""

    total: float = 0.0
    count: int = 0
    low: float = inf
    high: float = -inf

    def add(self, value: float, number: int) -> None:
        self.total += value * number
        self.count += number
        self.low, self.high = min(self.low, value), max(self.high, value)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else nan

    @property
    def scale(self) -> float:
        return max(abs(self.low), abs(self.high))


class ClientLosses:
    """Measures clients on their training data, without a trace in the module, its metrics or its logs.

    A forward pass has ``batch_size`` samples; ``"training"``: as many as in training, so that losses which depend on
    the batch (contrastive ones, sums) are those that clients train on; ``None``: ``factor`` times as many. As long as
    there is no factor, batches are as in training, and clients may look for one.
    """

    def __init__(
        self, calls: ModuleCalls, batches: ClientBatches, batch_size: int | Literal["training"] | None
    ) -> None:  # fmt: skip
        self._calls, self._batches = calls, batches
        self._batch_size = batch_size if isinstance(batch_size, int) else None
        self._is_fixed = batch_size is not None
        self.factor: int | None = None
        self._differentiates = False
        self._loss: Callable[[Any, int], Any] = getattr(calls.module, "federated_loss", None) or calls.training_output

    def measure(
        self, client: int, needs: Needs, preserved: Callable[[], AbstractContextManager[None]], looks: bool = False
    ) -> tuple[dict[str, float], int | None]:
        """Sample-weighted means over the client's training data at the bound parameters, in eval mode.

        ``preserved`` brings random numbers and buffers back. Beside the means stands the factor that a client which
        ``looks`` has found to give them, too: 1 if no larger one does, ``None`` if it cannot tell or has not looked.
        """
        means, nbytes = self._pass(client, needs, preserved, self.factor or 1)
        found = {name: mean.value for name, mean in means.items()}
        largest = (_BYTES_ON_CPU if self._calls.module.device.type == "cpu" else _BYTES) // max(nbytes, 1)
        tells = all(mean.high - mean.low > _SPREAD * mean.scale for mean in means.values())
        if not looks or self._is_fixed or self.factor is not None or largest < 2 or not tells:
            return found, None
        factor = min(largest, MAX_FACTOR)
        try:
            joined, _ = self._pass(client, needs, preserved, factor)
        except Exception:  # no memory for so much, or a module that knows how long its batches are
            return found, 1
        same = all(abs(joined[name].value - mean.value) <= _ROUNDING * mean.scale for name, mean in means.items())
        return found, factor if same else 1

    def _pass(
        self, client: int, needs: Needs, preserved: Callable[[], AbstractContextManager[None]], factor: int
    ) -> tuple[dict[str, _Mean], int]:
        """The means, and the bytes of the first batch."""
        wanted: dict[str, Callable[[Any, int], Any]] = {}
        if needs.losses or needs.requery:
            wanted["loss"] = self._module_loss
        if needs.accuracies:
            accuracy = getattr(self._calls.module, "federated_accuracy")  # noqa: B009 (nn.Module's type)
            wanted["accuracy"] = accuracy
        try:
            with preserved(), self._calls.unseen(), torch.set_grad_enabled(self._differentiates):
                return self._means(client, wanted, factor)
        except RuntimeError as error:
            if self._differentiates or "does not require grad" not in str(error):
                raise
        self._differentiates = True  # a gradient penalty, for instance: the loss is made of gradients
        return self._pass(client, needs, preserved, factor)

    def _means(
        self, client: int, wanted: Mapping[str, Callable[[Any, int], Any]], factor: int
    ) -> tuple[dict[str, _Mean], int]:
        precision = self._calls.precision
        means, nbytes = {name: _Mean() for name in wanted}, 0
        size = self._batch_size or factor * self._batches.loaders.batch_size
        for index, (batch, number) in enumerate(self._batches.in_order(client, size)):
            nbytes = nbytes or nbytes_of(batch)
            moved = self._calls.converted(batch)
            for name, function in wanted.items():
                with precision.val_step_context():
                    value = function(moved, index)
                if value is not None:
                    means[name].add(float(value.detach() if isinstance(value, Tensor) else value), number)
        return means, nbytes

    def _module_loss(self, batch: Any, index: int) -> Any:
        output = self._loss(batch, index)
        return output.get("loss") if isinstance(output, Mapping) else output
