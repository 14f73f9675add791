# SPDX-License-Identifier: Apache-2.0
"""Trimmed means in pure torch, which define what the op computes."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.ops.dtypes import rounded

_CPU_BLOCK = 1 << 18  # numbers that are sorted at a time
_DEVICE_BLOCK = 1 << 24


def trimmed_mean(rows: Tensor, trim: int) -> Tensor:
    """See :func:`fl_lightning.ops.trimmed_mean`."""
    m, n = rows.shape
    out = rows.new_empty(n)
    width = max((_CPU_BLOCK if rows.device.type == "cpu" else _DEVICE_BLOCK) // m, 1)
    wide = torch.float64 if rows.device.type != "mps" else torch.float32
    for start in range(0, n, width):
        ordered = rows[:, start : start + width].T.sort(-1).values  # NaN last
        total = torch.zeros(len(ordered), dtype=wide, device=rows.device)
        for place in range(trim, m - trim):
            total.add_(ordered[:, place])
        mean = total.div_(m - 2 * trim)
        out[start : start + width] = rounded(torch.where(ordered[:, -1].isnan(), torch.nan, mean), out.dtype)
    return out
