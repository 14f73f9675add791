# SPDX-License-Identifier: Apache-2.0
"""The loader that Lightning iterates over in a fit: one item per place in the round's cohort."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset

from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.lightning.client_task import ClientTask


class RoundLoader:
    """What the epoch loop iterates over: the places of a round, each taken by a client or empty."""

    def __init__(self, size: int, loaders: ClientLoaders, open_round: Callable[[], Iterator[ClientTask]]) -> None:
        self.loaders, self._size, self._open_round = loaders, size, open_round

    @property
    def dataset(self) -> Dataset[Any]:
        """The training data of all clients, for whoever asks the trainer's loader for it."""
        return self.loaders.dataset

    @property
    def batch_size(self) -> int:
        """Samples of a local batch."""
        return self.loaders.batch_size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[ClientTask]:
        yield from self._open_round()
