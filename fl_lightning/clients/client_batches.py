# SPDX-License-Identifier: Apache-2.0
"""Which batches a client trains on, in which order, and how many steps that makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Any, Literal

import torch
from torch import nn

from fl_lightning.algorithms.attacks import Attack
from fl_lightning.core.modules import BatchNorm
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data.client_loaders import ClientLoaders, limited
from fl_lightning.lightning.round_clock import MeanVisit


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
