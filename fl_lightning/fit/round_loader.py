# SPDX-License-Identifier: Apache-2.0
"""The loader that Lightning iterates over in a fit, and how long a client's visit is on the clock of the fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset

from fl_lightning.clients.client_batches import ClientBatches, LocalOptions
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.lightning.batches import ClientTask
from fl_lightning.lightning.inspection import accumulation
from fl_lightning.lightning.names import Trainer

_MOST_STEPS = 10_000_000
"""A few minutes on any processor: no federation needs more, and a wrong message may name any number."""


class LoaderOfAll:
    """Stands before Lightning for the loaders of all clients."""

    def __init__(self, loaders: ClientLoaders) -> None:
        self.loaders = loaders

    @property
    def dataset(self) -> Dataset[Any]:
        """The data of all clients, for whoever asks the trainer's loader for it."""
        return self.loaders.dataset

    @property
    def batch_size(self) -> int:
        """Samples of a client's batch."""
        return self.loaders.batch_size


class RoundLoader(LoaderOfAll):
    """What the epoch loop iterates over: the places of a round, each taken by a client or empty."""

    def __init__(self, size: int, loaders: ClientLoaders, open_round: Callable[[], Iterator[ClientTask]]) -> None:
        super().__init__(loaders)
        self._size, self._open_round = size, open_round

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[ClientTask]:
        yield from self._open_round()


def local_batches(trainer: Trainer, options: LocalOptions, limit: int | float, loaders: ClientLoaders) -> ClientBatches:
    """The clients' batches, which decide how long a visit is."""
    return ClientBatches(loaders, options, limit, accumulation(trainer), trainer.lightning_module)


def check_visit_schedulers(trainer: Trainer, knows_clock: bool, steps: int) -> None:
    """Refuses schedulers that a client cannot bring to the round by itself: nobody sends their states.

    ``knows_clock`` says that the client knows how long a round is; ``steps`` are those of the rounds so far.
    """
    for config in trainer.lr_scheduler_configs:
        name = type(config.scheduler).__name__
        if config.reduce_on_plateau:
            raise ValueError(
                f"{name} steps by a validation metric, which the server has: set the learning rate there, or use a "
                "scheduler that counts rounds"
            )
        if not trainer.lightning_module.automatic_optimization:
            refuse_steps_by_hand(trainer, [1])
        if not knows_clock and config.interval == "step":
            raise ValueError(
                f"{name} steps within visits, and a client alone does not know what a round counts as: the server must "
                "send ServerMessage(steps_per_round=...), see FitDescription.steps_per_round"
            )
        if config.interval == "step" and steps > _MOST_STEPS:
            raise ValueError(
                f"{name} steps within visits, and a client moves it through all rounds so far: they must have at most "
                f"{_MOST_STEPS:,} steps, found {steps:,}"
            )


def refuse_steps_by_hand(trainer: Trainer, calls: Sequence[int]) -> None:
    """Refuses schedulers that a module steps itself: how far depends on visits that this client has not seen."""
    for config, times in zip(trainer.lr_scheduler_configs, calls, strict=False):
        if times:
            raise ValueError(
                f"{type(config.scheduler).__name__} is stepped by hand, and a client alone does not know how far the "
                "others' visits moved it: compute the learning rate from self.current_epoch, which is the round, or "
                "let Lightning step the scheduler"
            )
