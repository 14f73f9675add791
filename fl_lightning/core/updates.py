# SPDX-License-Identifier: Apache-2.0
"""The matrix of the cohort's updates.

Server rules ask ``UpdateMatrix`` for norms, Gram matrices, inner products and linear combinations. It calls
:mod:`fl_lightning.ops` for them. Rules do not touch the rows themselves: several processes may share the columns, and
what is a sum over all columns then takes all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.arguments import checked, trusted
from fl_lightning.core.columns import Columns
from fl_lightning.core.layout import ParamLayout
from fl_lightning.ops.dtypes import accumulation_device
from fl_lightning.ops.slices import add_tree, slice_columns


class UpdateMatrix:
    """The updates of a cohort: row ``i`` is ``theta - theta_i``, so it points like a gradient.

    Args:
        rows: ``[m, n]`` floating-point matrix on any device; rows are contiguous, at any distance from each other.
        layout: how the columns divide into layers.
        columns: which of the layout's columns the rows hold; ``None``: all.
        norms: ``[m]`` float64 norms of the whole rows, if they are known.

    Attributes:
        rows: ``[m, n]``; with several shares, the columns of this one.
        layout: how the columns of all shares divide into layers.
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
        self.rows, self.layout, self.columns = rows, layout, columns
        self._norms = norms
        self._gram: Tensor | None = None

    def __len__(self) -> int:
        return self.rows.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self.rows.dtype

    def beside(self, rows: Tensor) -> UpdateMatrix:
        """A matrix of other rows with the same columns, on any device."""
        return trusted(UpdateMatrix)(rows, self.layout, self.columns)

    def norms(self) -> Tensor:
        """Euclidean norms of the rows, ``[m]`` float64; computed once (the rows must not change afterwards).

        A row with NaN or infinity has a norm that is not finite.
        """
        if self._norms is None:
            rows, total = self.rows, self.columns.total
            squares = self.columns.sum(
                (0, total), lambda at, offsets: ops.layer_squares(rows[:, at], offsets, total_columns=total)
            )
            self._norms = squares[0].sqrt()
        return self._norms

    def norm_of(self, step: Tensor) -> Tensor:
        """Euclidean norm of a step ``[n]`` with the same columns, a float64 scalar; not finite if the step is not."""
        return self.beside(step[None]).norms()[0]

    def gram(self) -> Tensor:
        """Per-layer Gram matrices ``[L, m, m]`` in float64; computed once (the rows must not change afterwards)."""
        if self._gram is None:
            rows, total = self.rows, self.columns.total
            self._gram = self._layer_sums(lambda at, offsets: ops.layer_gram(rows[:, at], offsets, total_columns=total))
        return self._gram

    def cross_gram(self, others: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Inner products with other rows: ``[L, m, h]`` in float64.

        Args:
            others: ``[k, n]`` with the same columns.
            chosen: ``[h]`` int64 on the CPU, which of them; ``None``: all, ``h = k``.
        """
        rows, total = self.rows, self.columns.total
        return self._layer_sums(
            lambda at, offsets: ops.layer_cross_gram(rows[:, at], others[:, at], offsets, chosen, total_columns=total)
        )

    def dots(self, step: Tensor, starts: tuple[int, ...] | None = None) -> Tensor:
        """Inner products of every row with a step ``[n]``, per layer: ``[L, m]`` in float64.

        Args:
            step: with the same columns.
            starts: where other segments than layers begin, as :meth:`fl_lightning.core.columns.Columns.sum` takes them.
        """
        rows, total = self.rows, self.columns.total
        return self.columns.sum(
            self.layout.layer_starts if starts is None else starts,
            lambda at, offsets: ops.layer_dots(rows[:, at], step[at], offsets, total_columns=total),
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
        above = torch.triu_indices(m, m, 1)
        found[above[0], above[1]] = self.columns.sum((0, total), part)[0].cpu()
        return found + found.T

    def puc_track(self, row: int, counts: Tensor, threshold: int, participations: int) -> tuple[Tensor, Tensor]:
        """What one client keeps of its update: :func:`fl_lightning.ops.puc_track` of one row.

        Args:
            row: its place.
            counts: ``[n]`` past increases, changed in place.
            threshold: see there.
            participations: see there.

        Returns:
            ``[ceil(n / 32)]`` bits, and the squared norms of what is kept: one per parameter tensor, float64.
        """
        values, total, kept = self.rows[row], self.columns.total, []

        def part(at: slice, offsets: Tensor) -> Tensor:
            bits, squares = ops.puc_track(
                values[at], counts[at], threshold, participations, offsets, total_columns=total
            )
            kept.append(bits)
            return squares

        squares = self.columns.sum(self.layout.starts, part)
        return torch.cat(kept), squares

    def _layer_sums(self, part: Callable[[slice, Tensor], Tensor]) -> Tensor:
        return self.columns.sum(self.layout.layer_starts, part)

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
