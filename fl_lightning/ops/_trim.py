# SPDX-License-Identifier: Apache-2.0
"""Robust means, coordinate by coordinate."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.ops import _check, _library, _trimmed_mean  # noqa: F401  (the import registers the ops)

_ROWS_ON_DEVICE = 6144  # float64 columns of so many numbers fit into a block's shared memory


@torch.no_grad()
def trimmed_mean(rows: Tensor, trim: int) -> Tensor:
    """In each column, the mean of the numbers without the ``trim`` least and the ``trim`` largest ones.

    ``trim = (m - 1) // 2`` gives the median; of an even number of rows, the mean of the two in the middle. Sums run in
    float64, and the mean is rounded once. A column with NaN has the mean NaN.

    Args:
        rows: ``[m, n]``, at least one row.
        trim: how many numbers to leave out at either end, from 0 to below ``m / 2``.

    Returns:
        ``[n]`` in the rows' dtype.

    Raises:
        TypeError: a dtype is not allowed.
        ValueError: a shape or ``trim`` is out of range.
    """
    _check.matrix("rows", rows)
    _check.integer("trim", trim)
    m = rows.shape[0]
    if not 2 * trim < m:
        raise ValueError(f"trim must be below half of the {m} rows, found {trim}")
    if rows.device.type == "cuda" and m > _ROWS_ON_DEVICE:
        return _trimmed_mean.trimmed_mean(rows, trim)
    mean: Tensor = torch.ops.fl_lightning.trimmed_mean(rows, trim)
    return mean
