# SPDX-License-Identifier: Apache-2.0
"""Lengths of the rows behind Gram matrices, and which rows count beside the others."""

from __future__ import annotations

import torch
from torch import Tensor


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
