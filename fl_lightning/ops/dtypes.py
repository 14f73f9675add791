# SPDX-License-Identifier: Apache-2.0
"""Where float64 numbers live on devices that have none, and how they are rounded."""

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
