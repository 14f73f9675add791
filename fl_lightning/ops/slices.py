# SPDX-License-Identifier: Apache-2.0
"""The order of sums over columns: slices, added up along a binary tree.

The number ``n`` of all columns alone decides where slices begin: at the multiples of a width of 8192 columns or, where
that would be more than 256 slices, of the least power of two times 8192 that leaves no more. The last slice may be
narrower.

A sum over columns is taken slice by slice. Then the slices' sums are added along the complete binary tree over their
numbers: node ``i`` of level ``k`` adds up the slices from ``i 2^k`` up to ``(i + 1) 2^k``, level by level. A node
without slices, or without a column of the layer that is summed, is passed over.

What lies in a slice decides its sum, not where the matrix around it begins or ends. So several processes may hold runs
of the columns. Each takes the sums of the largest nodes that its run holds whole (:func:`subtrees`); added along the
upper part of the tree (:func:`add_tree`), they have the bits of the sum over one matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import Tensor

_WIDTH = 8192
_MOST = 256


def slice_columns(total_columns: int) -> int:
    """Width of the slices of a matrix with this many columns."""
    width = _WIDTH
    while total_columns > _MOST * width:
        width *= 2
    return width


def subtrees(begin: int, end: int, total_columns: int) -> list[tuple[int, int]]:
    """The columns of the largest nodes of the tree that a run, from a slice to a slice or the end, holds whole."""
    width = slice_columns(total_columns)
    if not 0 <= begin <= end <= total_columns or begin % width or (end % width and end != total_columns):
        raise ValueError(
            f"begin and end must be multiples of {width} or the end of {total_columns} columns, found {begin} and {end}"
        )
    spans = []
    while begin < end:
        size = width
        while begin % (2 * size) == 0 and min(begin + 2 * size, total_columns) <= end and begin + size < end:
            size *= 2
        spans.append((begin, min(begin + size, end)))
        begin += size
    return spans


def add_tree(spans: Sequence[tuple[int, int]], parts: Iterable[Tensor], total_columns: int) -> Tensor:
    """Adds sums over nodes of the tree along the tree.

    The nodes, by their columns ``(begin, end)``, are in order and without gaps. Their sums, all of one shape, are taken
    one by one: few exist at the same time.
    """
    width = slice_columns(total_columns)
    if not spans or any(last[1] != span[0] for last, span in pairwise(spans)):
        raise ValueError(f"spans must follow one another, found {list(spans)}")
    waiting: dict[int, Tensor] = {}  # by level: a left node, whose right neighbour is not complete
    for (begin, end), part in zip(spans, parts, strict=True):
        level = (-(-(end - begin) // width) - 1).bit_length()
        while begin // width >> level & 1:
            part = waiting.pop(level) + part if level in waiting else part
            level += 1
        waiting[level] = part
    total, *lefts = (waiting[level] for level in sorted(waiting))
    for left in lefts:
        total = left + total
    return total
