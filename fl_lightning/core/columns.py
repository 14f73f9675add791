# SPDX-License-Identifier: Apache-2.0
"""Which columns of the flat vector lie here, and sums over all of them.

One process holds all columns unless several share the server's work, each a run of them. Combinations of rows stay
within a share. Sums over columns are added up in one order that does not depend on the shares, so every number of
shares gives the same bits (:mod:`fl_lightning.ops.slices`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from fl_lightning.ops.slices import add_tree, slice_columns, subtrees


def _alone(mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [mine]


def _unseen(numbers: Tensor) -> None:
    pass


@dataclass(frozen=True)
class Columns:
    """The share of the columns that lies here.

    All shares call ``gather`` at the same places: it hands in a tensor of this share and returns those of all, whose
    first dimensions are the second argument. ``note`` is told of numbers that must be the same on all shares, such as
    the coefficients of a step, so that shares that came to others can be found out.
    """

    # R + 1 numbers that rise from 0 to n: share r holds the columns from the r-th on, or none. Others than 0 and n lie
    # between slices, as cut() gives them.
    borders: tuple[int, ...]
    share: int = 0  # the number of this one
    gather: Callable[[Tensor, Sequence[int]], list[Tensor]] = _alone
    note: Callable[[Tensor], None] = _unseen

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
        begin, end = self.span
        return end - begin

    @property
    def span(self) -> tuple[int, int]:
        """The first column of this share, and the one after its last."""
        return self.spans[self.share]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Those of all shares."""
        return list(pairwise(self.borders))

    def part(self, values: Tensor) -> Tensor:
        """The columns ``[..., numel]`` of this share of a tensor ``[..., n]``; not a copy."""
        begin, end = self.span
        return values[..., begin:end]

    def joined(self, part: Tensor) -> Tensor:
        """A vector ``[n]`` of whose columns every share hands in its own; all shares get it."""
        if len(self.borders) == 2:
            return part
        return torch.cat(self.gather(part, [end - begin for begin, end in self.spans]))

    def offsets(self, starts: tuple[int, ...]) -> Tensor:
        """Where segments of all columns begin here: ``[L + 1]`` int64 on the CPU for the ops; not to be changed."""
        return _within(starts, *self.span)

    def sum(self, starts: tuple[int, ...], part: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """A sum per segment over the columns of all shares: ``[L, ...]``, on every share the same.

        Segments begin at ``starts``, ``L + 1`` numbers that rise from 0 to ``n``. ``part`` gives the sums ``[L, ...]``
        over some of this share's columns, for the columns and their segments' offsets. It must hand :attr:`total` to
        the op that adds up.
        """
        begin, end = self.span
        if len(self.borders) == 2:
            return part(slice(begin, end), _within(starts, begin, end))
        nodes = [subtrees(*span, self.total) for span in self.spans]
        held = [[_segments(starts, *node) for node in some] for some in nodes]
        sums = [
            part(slice(a - begin, b - begin), _within(starts, a, b))[at]
            for (a, b), at in zip(nodes[self.share], held[self.share], strict=True)
        ]
        mine = torch.cat(sums) if sums else part(slice(0, 0), _within(starts, begin, begin))[:0]
        found = torch.cat(self.gather(mine, [sum(at.stop - at.start for at in some) for some in held]))

        def wholes() -> Iterator[Tensor]:
            ats = [at for some in held for at in some]
            for at, segments in zip(ats, torch.split(found, [at.stop - at.start for at in ats]), strict=True):
                whole = found.new_zeros(len(starts) - 1, *found.shape[1:])
                whole[at] = segments
                yield whole

        return add_tree([node for some in nodes for node in some], wholes(), self.total)

    def count(self, number: Tensor) -> int:
        """The sum over the shares of an integer."""
        return int(torch.cat(self.gather(number.reshape(1), [1] * len(self.spans))).sum())


@lru_cache(maxsize=256)
def _within(starts: tuple[int, ...], begin: int, end: int) -> Tensor:
    return torch.tensor([min(max(start, begin), end) - begin for start in starts], dtype=torch.int64)


def _segments(starts: Sequence[int], begin: int, end: int) -> slice:
    """Those that have columns in a run; sums over the others are 0 there, and need not travel."""
    return slice(bisect_right(starts, begin) - 1, bisect_left(starts, end))
