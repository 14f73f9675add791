# SPDX-License-Identifier: Apache-2.0
"""Which columns of the flat vector lie here, and sums over all of them.

One process holds all columns unless several share the server's work. Then each holds a share: a run of the columns.
Combinations of rows stay within a share. Sums over columns are added up in one order that does not depend on the
shares, so every number of shares gives the same bits (:mod:`fl_lightning.ops.slices`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fl_lightning.ops.slices import add_tree, slice_columns, subtrees


def _alone(mine: Tensor) -> list[Tensor]:
    return [mine]


@dataclass(frozen=True)
class Columns:
    """The share of the columns that lies here.

    Attributes:
        borders: ``R + 1`` numbers that rise from 0 to ``n``; share ``r`` holds the columns ``borders[r]`` up to
            ``borders[r + 1]`` and may be empty. All but 0 and ``n`` lie between slices, see :meth:`cut`.
        share: the number of this share.
        gather: hands in a tensor of this share and returns those of all shares in their order. All shares call it at
            the same places; first dimensions may differ.

    Raises:
        ValueError: a border or the share's number breaks the rules above.
    """

    borders: tuple[int, ...]
    share: int = 0
    gather: Callable[[Tensor], list[Tensor]] = _alone

    def __post_init__(self) -> None:
        borders, width = self.borders, slice_columns(self.total) if self.borders else 0
        if len(borders) < 2 or borders[0] != 0 or any(a > b for a, b in pairwise(borders)):
            raise ValueError(f"borders must rise from 0 to the number of columns, found {borders}")
        if any(border % width and border != self.total for border in borders):
            raise ValueError(f"borders must be multiples of {width} for {self.total} columns, found {borders}")
        if not 0 <= self.share < len(borders) - 1:
            raise ValueError(f"share must lie between 0 and {len(borders) - 2}, found {self.share}")

    @classmethod
    def whole(cls, total: int) -> Columns:
        """All columns in one share."""
        return cls((0, total))

    @staticmethod
    def cut(total: int, shares: int) -> tuple[int, ...]:
        """Borders of shares with as equal numbers of slices as can be."""
        width = slice_columns(total)
        slices = -(-total // width)
        return tuple(min(slices * share // shares * width, total) for share in range(shares + 1))

    @property
    def total(self) -> int:
        """Number of columns of all shares, ``n``."""
        return self.borders[-1]

    @property
    def numel(self) -> int:
        """Number of columns of this share."""
        begin, end = self._span
        return end - begin

    @property
    def _span(self) -> tuple[int, int]:
        return self.borders[self.share], self.borders[self.share + 1]

    def offsets(self, starts: Sequence[int]) -> Tensor:
        """Where segments of all columns begin in this share: ``[L + 1]`` int64 on the CPU, as the ops take them.

        Args:
            starts: ``L + 1`` numbers that rise from 0 to ``n``.
        """
        return _within(starts, *self._span)

    def sum(self, starts: Sequence[int], part: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """A sum per segment over the columns of all shares.

        Args:
            starts: where the segments begin: ``L + 1`` numbers that rise from 0 to ``n``.
            part: gives the sums ``[L, ...]`` over some of this share's columns, for the columns and their segments'
                offsets. It must hand :attr:`total` to the op that adds up.

        Returns:
            ``[L, ...]``, on every share the same.
        """
        begin, end = self._span
        if len(self.borders) == 2:
            return part(slice(begin, end), _within(starts, begin, end))
        spans = subtrees(begin, end, self.total)
        sums = [part(slice(a - begin, b - begin), _within(starts, a, b)) for a, b in spans]
        mine = torch.stack(sums) if sums else part(slice(0, 0), _within(starts, begin, begin))[None][:0]
        everyones = [span for a, b in pairwise(self.borders) for span in subtrees(a, b, self.total)]
        return add_tree(everyones, torch.cat(self.gather(mine)), self.total)

    def count(self, number: Tensor) -> int:
        """The sum over the shares of an integer."""
        return int(torch.cat(self.gather(number.reshape(1))).sum())


def _within(starts: Sequence[int], begin: int, end: int) -> Tensor:
    return torch.tensor([min(max(start, begin), end) - begin for start in starts], dtype=torch.int64)
