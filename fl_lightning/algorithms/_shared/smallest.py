# SPDX-License-Identifier: Apache-2.0
"""Which numbers of a row are its smallest, where several processes may each hold some of the columns."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fl_lightning.core.columns import Columns


def smallest(values: Tensor, counts: Tensor, columns: Columns, starts: tuple[int, ...]) -> Tensor:
    """Marks the smallest numbers of every row in every segment, and all that equal the largest of these.

    Args:
        values: ``[k, n]`` not negative and not NaN, float32 or float64, with the columns of this share.
        counts: ``[k, L]`` int64, beside them: how many numbers to mark, up to all.
        columns: which columns are here.
        starts: where the segments begin: ``L + 1`` numbers that rise from 0 to the number of all columns.

    Returns:
        ``[k, n]`` bool.
    """
    segments = list(pairwise(columns.offsets(starts).tolist()))
    parts = [values[:, a:b] for a, b in segments]
    if len(columns.borders) > 2:
        bounds = _bounds_of_shares(values, counts, columns, starts)
    else:
        bounds = torch.stack([_bounds(part, k) for part, k in zip(parts, counts.T.tolist(), strict=True)], 1)
    return torch.cat([part <= bound[:, None] for part, bound in zip(parts, bounds.T, strict=True)], 1)


def _bounds(values: Tensor, counts: list[int]) -> Tensor:
    """``[k]`` the largest of each row's smallest numbers; -1 where these are none."""
    none = values.new_full((), -1.0)
    found = [row.kthvalue(count).values if count else none for row, count in zip(values, counts, strict=True)]
    return torch.stack(found)


def _bounds_of_shares(values: Tensor, counts: Tensor, columns: Columns, starts: tuple[int, ...]) -> Tensor:
    """The same, ``[k, L]``, by bisection: shares exchange how many of their numbers lie below.

    The bits of floating-point numbers have the order of the numbers, where none is negative.
    """
    kind, infinity = (torch.int32, 0x7F800000) if values.dtype == torch.float32 else (torch.int64, 0x7FF0000000000000)
    bits = values.view(kind)
    low, high = torch.full_like(counts, -1), torch.full_like(counts, infinity)
    while bool((low < high).any()):
        middle = low + (high - low) // 2  # a sum of both could overflow
        bounds = middle.T.to(kind)[:, :, None]

        def part(at: slice, offsets: Tensor, bounds: Tensor = bounds) -> Tensor:
            segments = pairwise(offsets.tolist())
            return torch.stack([(bits[:, at][:, a:b] <= bounds[i]).sum(1) for i, (a, b) in enumerate(segments)])

        enough = counts <= columns.sum(starts, part).T
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return torch.where(counts > 0, high.to(kind).view(values.dtype), -1.0)
