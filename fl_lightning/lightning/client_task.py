# SPDX-License-Identifier: Apache-2.0
"""What callbacks see where Lightning has a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ClientTask:
    """What callbacks see as a "batch": one client of the round.

    Attributes:
        client_id: the client, or ``None`` for an empty place.
        index: place in the cohort.
        round: index of the round.
        num_samples: the client's training samples.
        num_batches: local batches of one local epoch.
    """

    client_id: int | None
    index: int
    round: int
    num_samples: int = 0
    num_batches: int = 0

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
