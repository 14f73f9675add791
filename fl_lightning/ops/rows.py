# SPDX-License-Identifier: Apache-2.0
"""What is asked of rows everywhere: where numbers about them live and how they are rounded, and which rows count."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_device(rows: Tensor) -> torch.device:
    """Where float64 results about ``rows`` live: beside them, or on the CPU where the device has no float64."""
    return torch.device("cpu") if rows.device.type == "mps" else rows.device


def rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in a dtype, rounded once. PyTorch rounds float64 to float32 on its way to 16 bits."""
    if numbers.dtype == torch.float64 and dtype.itemsize == 2:
        bits, rest = numbers.contiguous().view(torch.int64), (1 << 39) - 1
        odd = (bits & rest).add_(rest)  # bit 39 says whether anything stands below it
        numbers = odd.bitwise_or_(bits).bitwise_and_(~rest).view(torch.float64)
    return numbers.to(dtype)


def row_norms(gram: Tensor) -> Tensor:
    """Lengths of the rows behind Gram matrices ``[..., k, k]``."""
    return gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()


def live_rows(norms: Tensor, online: int, zero_row: float) -> Tensor:
    """Which rows count, by their lengths ``[..., k]``: those longer than ``zero_row`` times the median.

    The median is of the lengths that are not 0 among the first ``online``, the lower one of an even number: no single
    client, however long its row, can make the others' count as zero.
    """
    lengths = norms[..., :online]
    ascending = torch.where(lengths == 0, torch.inf, lengths).sort(-1).values
    middle = (lengths.count_nonzero(-1) - 1).clamp_min(0) // 2
    return norms > zero_row * ascending.gather(-1, middle[..., None])
