# SPDX-License-Identifier: Apache-2.0
"""All clients' training data as a fit shows them to modules and callbacks."""

from __future__ import annotations

from collections.abc import Callable

from fl_lightning.data.client_loaders import ClientLoaders


class VisitLoader(ClientLoaders):
    """The same loaders, as long as a client's visit: by their length modules count the steps of their schedules."""

    def __init__(self, loaders: ClientLoaders, batches: Callable[[ClientLoaders], int]) -> None:
        vars(self).update(vars(loaders))
        self.loaders, self._count = loaders, batches

    def __len__(self) -> int:
        """Batches of a visit over all local epochs: ``trainer.num_training_batches``, but for the trainer's limits."""
        return self._count(self.loaders)
