# SPDX-License-Identifier: Apache-2.0
"""Clients that know of each other, or of all, and agree on what to send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.attacks.base import Attack
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.updates import UpdateMatrix

_BLOCK = 1 << 20


@checked(clients=Bounds(0), z=Bounds(0))
@dataclass(frozen=True)
class ALIE(Attack):
    """A little is enough: the mean of updates less ``z`` of their standard deviations, in each coordinate.

    That is so small a lie that it hides in the spread of honest updates. ``z`` is the largest number for which more
    honest clients than are needed for a majority lie further from the mean: with ``m`` of ``n`` clients dishonest,
    ``s = floor(n / 2 + 1) - m`` and ``Phi(z) = (n - m - s) / (n - m)``. Where that gives less than 0, ``z`` is 0.

    Moran Baruch, Gilad Baruch, Yoav Goldberg: A Little Is Enough: Circumventing Defenses For Distributed Learning.
    NeurIPS 2019, Algorithm 3. https://arxiv.org/abs/1902.06156

    Attributes:
        clients: ids of the dishonest clients.
        z: standard deviations; ``None``: as above, in each round.
        knows: whose updates mean and deviation are taken of: ``"own"`` those that the dishonest clients would have sent
            (the paper), of which one has no deviation, or ``"honest"`` those of all honest ones.

    Raises:
        ValueError: ``z`` is negative or not finite.
    """

    clients: Sequence[int]
    z: float | None = None
    knows: Literal["own", "honest"] = "own"

    def conspire(self, updates: UpdateMatrix, dishonest: Sequence[int]) -> bool:
        """Writes the same row for all dishonest clients."""
        n, m = len(updates), len(dishonest)
        seen = list(dishonest) if self.knows == "own" else [place for place in range(n) if place not in dishonest]
        if not seen:
            return False
        z, rows = hidden_deviations(n, m) if self.z is None else self.z, updates.rows
        width = max(_BLOCK // len(seen), 1)
        for start in range(0, rows.shape[1], width):
            block = rows[seen, start : start + width].double()
            rows[list(dishonest), start : start + width] = (block.mean(0) - z * block.std(0, correction=0)).to(
                rows.dtype
            )
        return True


def hidden_deviations(n: int, m: int) -> float:
    """``z`` of :class:`ALIE` for ``m`` dishonest of ``n`` clients; 0 where the formula gives less or nothing."""
    if m >= n:
        return 0.0
    share = (n - m - (n // 2 + 1 - m)) / (n - m)
    z = float(torch.special.ndtri(torch.tensor(share, dtype=torch.float64)))
    return z if 0 < z < float("inf") else 0.0


@checked(clients=Bounds(0), epsilon=Bounds(above=0))
@dataclass(frozen=True)
class InnerProductManipulation(Attack):
    """``-epsilon`` times the mean of the honest updates, so that the product of the mean of all with it is small.

    With ``m`` of ``n`` clients dishonest, the mean of all turns around where ``epsilon > (n - m) / m``. A small
    ``epsilon`` is harder to see.

    Cong Xie, Oluwasanmi Koyejo, Indranil Gupta: Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product
    Manipulation. UAI 2019, section 4. https://arxiv.org/abs/1903.03936

    Attributes:
        clients: ids of the dishonest clients.
        epsilon: the factor.

    Raises:
        ValueError: ``epsilon`` is not positive and finite.
    """

    clients: Sequence[int]
    epsilon: float = 0.5

    def conspire(self, updates: UpdateMatrix, dishonest: Sequence[int]) -> bool:
        """Writes the same row for all dishonest clients."""
        honest = [place for place in range(len(updates)) if place not in dishonest]
        if not honest:
            return False
        weights = torch.zeros(len(updates), dtype=torch.float64)
        weights[honest] = -self.epsilon / len(honest)
        row: Tensor = updates.combine(weights)
        updates.rows[list(dishonest)] = row
        return True
