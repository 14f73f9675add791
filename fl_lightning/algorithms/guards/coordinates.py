# SPDX-License-Identifier: Apache-2.0
"""Coordinate-wise median and trimmed mean.

Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates. ICML 2018. https://arxiv.org/abs/1803.01498
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.algorithms.guards.base import Guard, Rows, Verdict, all_the_same, assumed, below_half, require_clients
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort

_BLOCK = 1 << 20  # numbers that are sorted at a time


def by_columns(rows: Tensor, work: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Vectors ``[n]`` in the dtype of rows ``[m, n]`` that follow from the numbers in each column alone.

    ``work`` gets some columns ``[c, m]``, 16-bit numbers as float32, and gives vectors ``[c]``.
    """
    width, found = max(_BLOCK // len(rows), 1), list[tuple[Tensor, ...]]()
    for start in range(0, max(rows.shape[1], 1), width):
        block = rows[:, start : start + width].T
        found.append(work(block if block.dtype.itemsize > 2 else block.float()))
    return tuple(torch.cat(parts).to(rows.dtype) for parts in zip(*found, strict=True))


class CoordinateMedian(Guard):
    """Every row becomes the median of the rows in each coordinate (Definition 1).

    Of an even number of clients, the median is the mean of the two values in the middle. All clients have the same row
    then, and any rule whose weights add up to 1 takes it for its step. Nothing is left of what tells clients apart, so
    a fair rule behind it has nothing to weigh: :class:`TrimmedMean` with ``rows="own"`` leaves it more.
    """

    def judge(self, cohort: Cohort) -> Verdict:
        """See the class."""
        m = len(cohort)
        return all_the_same(ops.trimmed_mean(cohort.updates.rows, (m - 1) // 2), m)


class TrimmedMean(Guard):
    """In each coordinate, the mean without the ``b`` least and the ``b`` largest values (Definition 2).

    With ``rows="same"`` every row becomes this mean. With ``rows="own"``, each row keeps its values but for those that
    would be trimmed: they move to the nearest one that is not. A round with at most ``2 b`` usable reports changes
    nothing.

    Args:
        dishonest: ``b``, as a count or as a share of the cohort (the paper's beta), rounded up.
        rows: what becomes of the rows.

    Raises:
        ValueError: ``dishonest`` is out of range.
    """

    @checked(dishonest=Bounds(0))
    def __init__(self, dishonest: float | int, rows: Rows = "same") -> None:
        self.dishonest, self.rows = below_half(dishonest, self), rows

    def needed(self, m: int) -> int:
        """``2 b + 1``."""
        return 2 * assumed(self.dishonest, m) + 1

    def judge(self, cohort: Cohort) -> Verdict:
        """See the class."""
        m, rows = len(cohort), cohort.updates.rows
        b = assumed(self.dishonest, m)
        require_clients(m, self)
        if self.rows == "same":
            return all_the_same(ops.trimmed_mean(rows, b), m)

        def ends(columns: Tensor) -> tuple[Tensor, ...]:
            ordered = columns.sort(-1).values
            return ordered[:, b], ordered[:, m - 1 - b]

        low, high = by_columns(rows, ends)
        return Verdict(bounds=(low, high))
