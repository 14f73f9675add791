# SPDX-License-Identifier: Apache-2.0
"""The matrix of the cohort's updates.

Server rules ask ``UpdateMatrix`` for Gram matrices, inner products and linear combinations. It calls
:mod:`fl_lightning.ops` for them. Rules do not touch the rows themselves.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning import ops
from fl_lightning.core.layout import ParamLayout


class UpdateMatrix:
    """The updates of a cohort: row ``i`` is ``theta - theta_i``, so it points like a gradient.

    Args:
        rows: ``[m, n]`` floating-point matrix on any device; rows are contiguous, at any distance from each other.
        layout: how the ``n`` columns divide into layers.

    Raises:
        ValueError: wrong shape or dtype.
    """

    def __init__(self, rows: Tensor, layout: ParamLayout) -> None:
        if rows.dim() != 2 or rows.shape[1] != layout.numel:
            raise ValueError(f"rows must have shape [m, {layout.numel}], found {tuple(rows.shape)}")
        if not rows.is_floating_point():
            raise ValueError(f"rows must be floating point, found {rows.dtype}")
        self.rows = rows
        self.layout = layout
        self._gram: Tensor | None = None

    def __len__(self) -> int:
        return self.rows.shape[0]

    def gram(self) -> Tensor:
        """Per-layer Gram matrices ``[L, m, m]`` in float64; computed once (the rows must not change afterwards)."""
        if self._gram is None:
            self._gram = ops.layer_gram(self.rows, self.layout.offsets)
        return self._gram

    def cross_gram(self, others: Tensor) -> Tensor:
        """Inner products with other rows ``[h, n]``: ``[L, m, h]`` in float64."""
        return ops.layer_cross_gram(self.rows, others, self.layout.offsets)

    def dots(self, step: Tensor) -> Tensor:
        """Inner products of every row with a step ``[n]``, per layer: ``[L, m]`` in float64."""
        return ops.layer_dots(self.rows, step, self.layout.offsets)

    def combine(self, coeff: Tensor, out: Tensor | None = None) -> Tensor:
        """Linear combination of the rows, ``[n]``.

        Args:
            coeff: ``[L, m]`` per layer, or ``[m]`` for all layers alike.
            out: if given, the result is added to it in place.
        """
        if coeff.dim() == 1:
            coeff = coeff.expand(self.layout.num_layers, -1)
        return ops.layer_combine(self.rows, self.layout.offsets, coeff, out)
