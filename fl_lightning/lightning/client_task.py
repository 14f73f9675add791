# SPDX-License-Identifier: Apache-2.0
"""What callbacks see where Lightning has a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
