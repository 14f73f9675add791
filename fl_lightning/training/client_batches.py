# SPDX-License-Identifier: Apache-2.0
"""Which batches a client trains on, in which order, and how many steps that makes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import ceil
from typing import Any

from torch import nn

from fl_lightning.core.seeding import derive_seed
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.training.local_options import LocalOptions, limited


class ClientBatches:
    """The batches of every client's local training, from (seed, round, client) alone.

    Args:
        loaders: the clients' training data.
        options: how long clients train.
        window: batches per optimizer step (``accumulate_grad_batches``).
        module: a module with BatchNorm cannot train on one sample: a last batch of one joins the one before.

    Attributes:
        loaders: the clients' training data.
    """

    def __init__(self, loaders: ClientLoaders, options: LocalOptions, window: int, module: nn.Module) -> None:
        self.loaders, self._options, self._window = loaders, options, window
        self._merge = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())

    def in_training(self, client: int, round: int) -> Iterator[tuple[Any, int, int, bool]]:  # noqa: A002
        """Yields a batch, its samples, its place in its pass, and whether the pass ends with it."""
        for seed, take in self.passes(client, round):
            batches = self.loaders.batches(client, seed=seed, merge_single=self._merge)
            for index, (batch, size) in enumerate(islice(batches, take)):
                yield batch, size, index, index + 1 == take

    def passes(self, client: int, round: int) -> Iterator[tuple[int, int]]:  # noqa: A002
        """Passes over a client's data in local training: the seed of each one's order, and its number of batches."""
        options, window = self._options, self._window
        per_pass = limited(options.limit, self.loaders.num_batches(client, merge_single=self._merge))
        wanted, number = options.steps, 0
        while per_pass > 0 and (number < options.epochs if wanted is None else wanted > 0):
            take = per_pass if wanted is None else min(per_pass, wanted * window)
            yield derive_seed(options.seed, "shuffle", round, client, number), take
            if wanted is not None:
                wanted -= ceil(take / window)  # a pass ends with a step
            number += 1

    def planned_steps(self, client: int) -> int:
        """Optimizer steps that a client is going to take, if the module optimizes automatically and to the end."""
        return sum(ceil(take / self._window) for _, take in self.passes(client, 0))

    def in_order(self, client: int, batch_size: int | None = None) -> Iterator[tuple[Any, int]]:
        """One pass over all of the client's training data in the dataset's order: batches and their samples.

        Args:
            client: the client.
            batch_size: ``None``: as in training. A size of one's own choosing: ``drop_last`` does not apply to it.
        """
        size = batch_size or self.loaders.batch_size
        return self.loaders.batches(client, seed=None, batch_size=size, merge_single=self._merge)
