# SPDX-License-Identifier: Apache-2.0
"""One number per client, kept across rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class ClientNumbers:
    """One number per client id."""

    def __init__(self) -> None:
        self._numbers: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, clients: Sequence[int], start: Tensor | float) -> Tensor:
        """The clients' numbers ``[m]``, float64 on the CPU.

        Args:
            clients: ``m`` ids.
            start: those of clients that have none: a number each ``[m]``, or one for all.
        """
        starts = torch.as_tensor(start, dtype=torch.float64).expand(len(clients)).tolist()
        pairs = zip(clients, starts, strict=True)
        return torch.tensor([self._numbers.get(client, first) for client, first in pairs], dtype=torch.float64)

    def set(self, clients: Sequence[int], numbers: Tensor) -> None:
        """Replaces the clients' numbers by ``[m]`` others."""
        self._numbers |= dict(zip(clients, numbers.tolist(), strict=True))

    def mean(self) -> float:
        """Over all clients that have one; 0 if nobody has."""
        return sum(self._numbers.values()) / len(self._numbers) if self._numbers else 0.0

    def clear(self) -> None:
        """Forgets everything."""
        self._numbers.clear()

    def state_dict(self) -> dict[int, float]:
        """Numbers by client id."""
        return dict(self._numbers)

    def load_state_dict(self, state: Mapping[int, float]) -> None:
        """Restores :meth:`state_dict`."""
        self._numbers = {int(client): float(number) for client, number in state.items()}
