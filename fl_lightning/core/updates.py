# SPDX-License-Identifier: Apache-2.0
"""The matrix of the cohort's updates, and which of its columns lie here.

Server rules ask ``UpdateMatrix`` for what they need: several processes may divide the columns, each a run of them. Sums
over columns are added up in one order, so any number of shards gives the same bits (:mod:`fl_lightning.ops.slices`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.arguments import checked, trusted
from fl_lightning.core.layout import ParamLayout
from fl_lightning.ops.rows import accumulation_device
from fl_lightning.ops.slices import add_tree, slice_columns, subtrees


def _alone(mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [mine]


def _unseen(numbers: Tensor) -> None:
    pass


@dataclass(frozen=True)
class Columns:
    """The shard of the columns that lies here.

    All shards call ``gather`` at the same places: it hands in a tensor of this shard and returns those of all, whose
    first dimensions are the second argument. ``note`` is told of numbers that must be the same on all shards, such as
    the coefficients of a step, so that shards that came to others can be found out.
    """

    borders: tuple[int, ...]  # R + 1, from 0 to n: shard r begins at the r-th; between slices, as cut() gives them
    shard: int = 0  # the number of this one
    gather: Callable[[Tensor, Sequence[int]], list[Tensor]] = _alone
    note: Callable[[Tensor], None] = _unseen

    @classmethod
    def whole(cls, total: int) -> Columns:
        """All columns in one shard."""
        return cls((0, total))

    @staticmethod
    def cut(total: int, shards: int) -> tuple[int, ...]:
        """Borders of shards with as equal numbers of slices as can be."""
        width = slice_columns(total)
        slices = -(-total // width)
        return tuple(min(slices * shard // shards * width, total) for shard in range(shards + 1))

    @property
    def total(self) -> int:
        """Number of columns of all shards, ``n``."""
        return self.borders[-1]

    @property
    def numel(self) -> int:
        """Number of columns of this shard."""
        return self.span[1] - self.span[0]

    @property
    def span(self) -> tuple[int, int]:
        """The first column of this shard, and the one after its last."""
        return self.spans[self.shard]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Those of all shards."""
        return list(pairwise(self.borders))

    def part(self, values: Tensor) -> Tensor:
        """The columns ``[..., numel]`` of this shard of a tensor ``[..., n]``; not a copy."""
        return values[..., slice(*self.span)]

    def joined(self, part: Tensor) -> Tensor:
        """A vector ``[n]`` of whose columns every shard hands in its own; all shards get it."""
        if len(self.borders) == 2:
            return part
        return torch.cat(self.gather(part, [end - begin for begin, end in self.spans]))

    def offsets(self, starts: tuple[int, ...]) -> Tensor:
        """Where segments of all columns begin here: ``[L + 1]`` int64 on the CPU for the ops; not to be changed."""
        return _within(starts, *self.span)

    def sum(self, starts: tuple[int, ...], part: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """A sum per segment over the columns of all shards: ``[L, ...]``, on every shard the same.

        Segments begin at ``starts``, ``L + 1`` numbers that rise from 0 to ``n``. ``part`` gives the sums ``[L, ...]``
        over some of this shard's columns, for the columns and their segments' offsets. It must hand :attr:`total` to
        the op that adds up.
        """
        begin, end = self.span
        if len(self.borders) == 2:
            return part(slice(begin, end), _within(starts, begin, end))
        nodes = [subtrees(*span, self.total) for span in self.spans]
        # Those that have columns in a node; sums over the others are 0 there, and need not travel.
        held = [[slice(bisect_right(starts, a) - 1, bisect_left(starts, b)) for a, b in some] for some in nodes]
        sums = [
            part(slice(a - begin, b - begin), _within(starts, a, b))[at]
            for (a, b), at in zip(nodes[self.shard], held[self.shard], strict=True)
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
        """The sum over the shards of an integer."""
        return int(torch.cat(self.gather(number.reshape(1), [1] * len(self.spans))).sum())


@lru_cache(maxsize=256)
def _within(starts: tuple[int, ...], begin: int, end: int) -> Tensor:
    return torch.tensor([min(max(start, begin), end) - begin for start in starts], dtype=torch.int64)


class UpdateMatrix:
    """The updates of a cohort: row ``i`` is ``theta - theta_i``, so it points like a gradient.

    Args:
        rows: ``[m, n]`` floating-point matrix on any device; rows are contiguous, at any distance from each other.
        layout: how the columns divide into layers.
        columns: which of the layout's columns the rows hold; ``None``: all.
        norms: ``[m]`` float64 norms of the whole rows, if they are known.

    Attributes:
        rows: ``[m, n]``; with several shards, the columns of this one.
        layout: how the columns of all shards divide into layers.
        columns: which of them are here.

    Raises:
        ValueError: wrong shape or dtype.
    """

    @checked()
    def __init__(
        self, rows: Tensor, layout: ParamLayout, columns: Columns | None = None, norms: Tensor | None = None
    ) -> None:
        columns = Columns.whole(layout.numel) if columns is None else columns
        if columns.total != layout.numel:
            raise ValueError(f"columns must be those of the layout, {layout.numel}, found {columns.total}")
        if rows.dim() != 2 or rows.shape[1] != columns.numel:
            raise ValueError(f"rows must have shape [m, {columns.numel}], found {tuple(rows.shape)}")
        if not rows.is_floating_point():
            raise ValueError(f"rows must be floating point, found {rows.dtype}")
        if norms is not None and norms.shape != rows.shape[:1]:
            raise ValueError(f"norms must have shape [{rows.shape[0]}], found {tuple(norms.shape)}")
        self.rows, self.layout, self.columns, self._norms = rows, layout, columns, norms
        self._gram: Tensor | None = None

    def __len__(self) -> int:
        return self.rows.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.rows.device

    def beside(self, rows: Tensor) -> UpdateMatrix:
        """A matrix of other rows with the same columns, on any device."""
        return trusted(UpdateMatrix)(rows, self.layout, self.columns)

    def norms(self) -> Tensor:
        """Euclidean norms of the rows, ``[m]`` float64; computed once (the rows must not change afterwards).

        A row with NaN or infinity has a norm that is not finite.
        """
        if self._norms is None:
            self._norms = self.squares((0, self.columns.total))[0].sqrt()
        return self._norms

    def squares(self, starts: tuple[int, ...] | None = None) -> Tensor:
        """Squared norms of the rows per layer, or per segment as in :meth:`dots`: ``[L, m]`` in float64."""
        rows, total = self.rows, self.columns.total
        return self._sums(lambda at, offsets: ops.layer_squares(rows[:, at], offsets, total_columns=total), starts)

    def norm_of(self, step: Tensor) -> Tensor:
        """Euclidean norm of a step ``[n]`` with the same columns, a float64 scalar; not finite if the step is not."""
        return self.beside(step[None]).norms()[0]

    def gram(self) -> Tensor:
        """Per-layer Gram matrices ``[L, m, m]`` in float64; computed once (the rows must not change afterwards)."""
        if self._gram is None:
            rows, total = self.rows, self.columns.total
            self._gram = self._sums(lambda at, offsets: ops.layer_gram(rows[:, at], offsets, total_columns=total))
        return self._gram

    def cross_gram(self, others: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Inner products with other rows: ``[L, m, h]`` in float64.

        Args:
            others: ``[k, n]`` with the same columns.
            chosen: ``[h]`` int64 on the CPU, which of them; ``None``: all, ``h = k``.
        """
        rows, total = self.rows, self.columns.total
        return self._sums(
            lambda at, offsets: ops.layer_cross_gram(rows[:, at], others[:, at], offsets, chosen, total_columns=total)
        )

    def dots(self, step: Tensor, starts: tuple[int, ...] | None = None) -> Tensor:
        """Inner products of every row with a step ``[n]``, per layer: ``[L, m]`` in float64.

        Args:
            step: with the same columns.
            starts: where other segments than layers begin, as :meth:`Columns.sum` takes them.
        """
        rows, total = self.rows, self.columns.total
        return self._sums(
            lambda at, offsets: ops.layer_dots(rows[:, at], step[at], offsets, total_columns=total), starts
        )

    @torch.no_grad()
    def squared_distances(self, point: Tensor | None = None) -> Tensor:
        """Squared Euclidean distances of all pairs of rows: ``[m, m]`` in float64 on the CPU.

        They come from differences of rows, in float64 and one slice of columns at a time. Inner products would lose the
        digits in which rows that are nearly alike differ, and one row far away would be enough to lose those of all.

        Args:
            point: ``[n]`` with the same columns, counted as a last row: the result is ``[m + 1, m + 1]``.
        """
        rows, total, m = self.rows, self.columns.total, len(self) + (point is not None)
        width, device = slice_columns(total), accumulation_device(rows)

        def pairs(start: int, stop: int) -> Tensor:
            block = rows[:, start:stop].to(device, torch.float64)
            if point is not None:
                block = torch.cat([block, point[None, start:stop].to(block)])
            return torch.pdist(block).square()

        def part(at: slice, offsets: Tensor) -> Tensor:
            spans = [(start, min(start + width, at.stop)) for start in range(at.start, at.stop, width)]
            if not spans:
                return torch.zeros(1, m * (m - 1) // 2, dtype=torch.float64, device=device)
            inner = [(start - at.start, stop - at.start) for start, stop in spans]
            return add_tree(inner, (pairs(*span) for span in spans), total)[None]

        found = torch.zeros(m, m, dtype=torch.float64)
        found[torch.triu_indices(m, m, 1).unbind()] = self._sums(part, (0, total))[0].cpu()
        return found + found.T

    def puc_track(self, row: int, counts: Tensor, threshold: int, participations: int) -> tuple[Tensor, Tensor]:
        """What one client keeps of its update: :func:`fl_lightning.ops.puc_track` of one row.

        ``counts [n]``, past increases, change in place. Returns ``[ceil(n / 32)]`` bits, and the squared norms of what
        is kept: one per parameter tensor, float64.
        """
        values, total, masks = self.rows[row], self.columns.total, []

        def part(at: slice, offsets: Tensor) -> Tensor:
            bits, squares = ops.puc_track(
                values[at], counts[at], threshold, participations, offsets, total_columns=total
            )
            masks.append(bits)
            return squares

        squares = self._sums(part, self.layout.starts)
        return torch.cat(masks), squares

    def _sums(self, part: Callable[[slice, Tensor], Tensor], starts: tuple[int, ...] | None = None) -> Tensor:
        return self.columns.sum(self.layout.layer_starts if starts is None else starts, part)

    @property
    def offsets(self) -> Tensor:
        """``[L + 1]`` int64 offsets of the layers in the columns that are here, as the ops take them."""
        return self.columns.offsets(self.layout.layer_starts)

    def combine(self, coeff: Tensor, out: Tensor | None = None) -> Tensor:
        """Linear combination of the rows, ``[n]``.

        Args:
            coeff: ``[L, m]`` per layer, or ``[m]`` for all layers alike.
            out: if given, the result is added to it in place.
        """
        self.columns.note(coeff)
        if coeff.dim() == 1:
            return ops.layer_combine(self.rows, self.columns.offsets((0, self.columns.total)), coeff[None], out)
        return ops.layer_combine(self.rows, self.offsets, coeff, out)
