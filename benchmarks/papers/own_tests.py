# SPDX-License-Identifier: Apache-2.0
"""Tests of equal size for clients of unequal size, so that accuracies of small ones are no matter of a few images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.data import Partition, Samples


@dataclass(frozen=True)
class OwnTests(Partition):
    """Training data divided as by another partition, test data in blocks of equal size, one per client."""

    inner: Partition
    size: int

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """As the other partition."""
        return self.inner.split(labels, seed)

    def match(self, train: Samples, parts: Sequence[Tensor], samples: Samples, seed: int) -> list[Tensor]:
        """One block per client."""
        return list(torch.arange(len(samples)).split(self.size))


@dataclass(frozen=True)
class PartOf(Partition):
    """Every client keeps a part of what another partition gives it, drawn at random."""

    inner: Partition
    share: float

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """As the other partition, less what nobody keeps."""
        generator = torch.Generator().manual_seed(seed)
        parts = self.inner.split(labels, seed)
        return [p[torch.randperm(len(p), generator=generator)[: round(self.share * len(p))]].sort()[0] for p in parts]


def drawn_like(counts: Tensor, labels: Tensor, size: int, seed: int) -> Tensor:
    """Samples in proportion to what clients hold: by largest remainders, at random within a class, none twice.

    Args:
        counts: ``[N, C]`` how many samples of classes 0 to ``C - 1`` each client holds, at least one.
        labels: ``[n]`` of the samples to draw from, at least ``size`` of every class.
        size: samples per client.
        seed: of the draw.

    Returns:
        ``[N * size]`` indices, client by client.
    """
    generator = torch.Generator().manual_seed(seed)
    members = [torch.nonzero(labels == value).flatten() for value in range(counts.shape[1])]
    wanted = size * counts.double() / counts.sum(1, keepdim=True)
    whole = wanted.floor()
    rank = (wanted - whole).argsort(1, descending=True).argsort(1)
    take = (whole + (rank < size - whole.sum(1, keepdim=True))).long().tolist()
    return torch.cat(
        [
            place[torch.randperm(len(place), generator=generator)[:number]]
            for row in take
            for place, number in zip(members, row, strict=True)
        ]
    )
