# SPDX-License-Identifier: Apache-2.0
"""Ops that decide in every coordinate apart: FedHEAL's two passes over the updates, and means without extremes."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.ops import _check, _library, _reference  # noqa: F401  (the import registers the ops)

_ROWS_ON_DEVICE = 6144  # float64 columns of so many numbers fit into a block's shared memory


@torch.no_grad()
def puc_track(
    row: Tensor,
    counts: Tensor,
    threshold: int,
    participations: int,
    offsets: Tensor,
    *,
    total_columns: int | None = None,
) -> tuple[Tensor, Tensor]:
    """One client's pass 1: which coordinates move as they usually do, and how large the kept update is.

    A coordinate *increases* where ``row <= 0``: rows point like gradients, so the parameter moves by ``-row``; no
    change counts as an increase, NaN does not. With ``c`` past increases in ``t`` past participations, the number of
    past rounds that agree with this one is ``c`` for an increase and ``t - c`` otherwise; the coordinate is kept where
    that is at least ``threshold``. The decision uses the counts of past rounds only; the counts are updated afterwards.

    With a consistency bound ``tau``, a threshold of 0 in the first round and ``floor(tau * t) + 1`` later is the
    published code's rule; ``ceil(tau * (t + 1)) - 1`` is the paper's (FedHEAL, CVPR 2024, Algorithm 1).

    Args:
        row: ``[n]`` floating point, the client's update.
        counts: ``[n]`` uint8, int16 or int32 on the row's device: past increases, changed in place. It shares no
            memory with the row.
        threshold: agreeing rounds that a coordinate needs, at least 0; 0 keeps all.
        participations: the client's past participations ``t``; ``t + 1`` must fit the dtype of ``counts``.
        offsets: ``[L + 1]`` offsets of the segments (parameter tensors) to measure.
        total_columns: as in :func:`~fl_lightning.ops.layer_gram`.

    Returns:
        ``keep``, ``[ceil(n / 32)]`` int32 on the row's device: coordinate ``i`` is bit ``i % 32``, counted from the
        least significant, of word ``i // 32``; bits from ``n`` on are 0. And ``[L]`` float64: the squared norm of the
        kept part of each segment.

    Raises:
        TypeError: a dtype is not allowed.
        ValueError: a shape, a device, a number or the offsets' values break the rules above.
    """
    _check.floating("row", row, (None,))
    _check.check_shape("counts", counts, (row.shape[0],), torch.uint8, torch.int16, torch.int32)
    if counts.device != row.device:
        raise ValueError(f"counts must be on the row's device {row.device}, found {counts.device}")
    _check.integer("threshold", threshold)
    _check.integer("participations", participations)
    limit = torch.iinfo(counts.dtype).max
    if participations >= limit:
        raise ValueError(f"participations must be in 0..{limit - 1} for {counts.dtype} counts, found {participations}")
    _check.layer_offsets(offsets, row.shape[0])
    _check.node_of_tree(row.shape[0], total_columns)
    keep, norms = torch.ops.fl_lightning.puc_track(row, counts, threshold, participations, offsets, total_columns)
    return keep, norms


@torch.no_grad()
def puc_combine(rows: Tensor, keep: Tensor, weights: Tensor) -> Tensor:
    """Pass 2: the weighted mean, coordinate by coordinate, over the clients that keep the coordinate.

    A coordinate that no client keeps is 0 in the result, so the parameter stays. Sums run in float64, the quotient is
    rounded once. What a client does not keep is left out of the sums: NaN there has no effect.

    Args:
        rows: ``[m, n]``, at least one row.
        keep: ``[m, ceil(n / 32)]`` int32 on the rows' device, rows as :func:`puc_track` returns them.
        weights: ``[m]`` floating point on the CPU or the rows' device, positive (checked when on the CPU). They need
            not sum to one.

    Returns:
        ``[n]`` in the rows' dtype.

    Raises:
        TypeError: a dtype is not allowed.
        ValueError: a shape or device is wrong, or a weight is not positive.
    """
    _check.matrix("rows", rows)
    m, n = rows.shape
    _check.check_shape("keep", keep, (m, (n + 31) // 32), torch.int32)
    if keep.device != rows.device:
        raise ValueError(f"keep must be on the rows' device {rows.device}, found {keep.device}")
    _check.floating("weights", weights, (m,))
    _check.reachable("weights", weights, rows)
    _check.positive("weights", weights)
    step: Tensor = torch.ops.fl_lightning.puc_combine(rows, keep, weights)
    return step


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
        return _reference.trimmed_mean(rows, trim)
    mean: Tensor = torch.ops.fl_lightning.trimmed_mean(rows, trim)
    return mean
