# SPDX-License-Identifier: Apache-2.0
"""Inner products and linear combinations of updates, layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.ops import _check, _library  # noqa: F401  (the import registers the ops)


@torch.no_grad()
def layer_gram(rows: Tensor, offsets: Tensor, *, total_columns: int | None = None) -> Tensor:
    """Inner products of all pairs of rows, per layer, in one pass over the rows.

    In pure torch, and for float64 rows everywhere, sums run in float64. Compiled kernels add up a few products of
    narrower rows at a time in float32, and these sums in float64. The error of an entry is then below 1e-7 of the
    product of the two norms on rows that look random, below 5e-7 on constant rows or rows of one sign, and below 2e-6
    for all rows. Where products overflow in float32, sums fall back to float64; where they underflow, those on the
    CPU do. On CUDA products of rows whose elements are below about 1e-19 vanish: scale such rows up first. From 33 rows
    on (on an H100 or H200 from 17, of 16 bits from 11) tensor cores take over there, for all dtypes but float64: the
    first bound becomes 3e-7, the second one 8e-7, and float32 elements below about 1e-17 lose digits.

    Args:
        rows: ``[m, n]``, at least one row.
        offsets: ``[L + 1]`` layer offsets.
        total_columns: ``None``: ``rows`` are a whole matrix. Otherwise they are some of the columns of a matrix with
            this many, namely those of a node of the tree of sums: one of :func:`fl_lightning.ops.slices.subtrees`.
            :func:`fl_lightning.ops.slices.add_tree` adds the results for all columns up to the bits of the whole
            matrix.

    Returns:
        ``[L, m, m]`` float64, exactly symmetric; zero for an empty layer.

    Raises:
        TypeError: a dtype is not allowed.
        ValueError: a shape, a device, the offsets' values or the number of columns break the rules above.
    """
    _check.layers(rows, offsets, total_columns)
    gram: Tensor = torch.ops.fl_lightning.layer_gram(rows, offsets, total_columns)
    return gram


@torch.no_grad()
def layer_squares(rows: Tensor, offsets: Tensor, *, total_columns: int | None = None) -> Tensor:
    """Squared norm of every row, per layer, with the accuracy of :func:`layer_gram`.

    Args:
        rows: ``[m, n]``, at least one row.
        offsets: ``[L + 1]`` layer offsets.
        total_columns: as in :func:`layer_gram`.

    Returns:
        ``[L, m]`` float64. A row's bits depend neither on the rows beside it nor on where it lies in memory.

    Raises:
        TypeError: a dtype is not allowed.
        ValueError: a shape, a device, the offsets' values or the number of columns break the rules above.
    """
    _check.layers(rows, offsets, total_columns)
    squares: Tensor = torch.ops.fl_lightning.layer_squares(rows, offsets, total_columns)
    return squares


@torch.no_grad()
def layer_cross_gram(
    rows: Tensor, others: Tensor, offsets: Tensor, chosen: Tensor | None = None, *, total_columns: int | None = None
) -> Tensor:
    """Inner products of rows with other rows (remembered updates), per layer.

    Args:
        rows: ``[m, n]``, at least one row.
        others: ``[h, n]`` on the rows' device; its dtype may differ and ``h`` may be 0.
        offsets: ``[L + 1]`` layer offsets.
        chosen: ``[k]`` int64 on the CPU, which of the others count and in which order; ``None``: all. What is not
            chosen is not read on the CPU, whatever it holds.
        total_columns: as in :func:`layer_gram`.

    Returns:
        ``[L, m, h]``, or ``[L, m, k]`` of those chosen, in float64 with the accuracy of :func:`layer_gram`.

    Raises:
        TypeError: a dtype is not allowed.
        ValueError: a shape, a device, the offsets' values or the number of columns break the rules above.
    """
    _check.layers(rows, offsets, total_columns)
    _check.floating("others", others, (None, rows.shape[1]), beside=rows)
    gram: Tensor
    if chosen is None:
        gram = torch.ops.fl_lightning.layer_cross_gram(rows, others, offsets, total_columns)
    else:
        _check.positions("chosen", chosen, others.shape[0])
        gram = torch.ops.fl_lightning.layer_chosen_gram(rows, others, offsets, chosen, total_columns)
    return gram


@torch.no_grad()
def layer_dots(rows: Tensor, step: Tensor, offsets: Tensor, *, total_columns: int | None = None) -> Tensor:
    """Inner products of every row with one step, per layer; a client conflicts with the step where it is negative.

    Args:
        rows: ``[m, n]``, at least one row.
        step: ``[n]`` on the rows' device, of any floating-point dtype; it need not lie in the span of the rows.
        offsets: ``[L + 1]`` layer offsets.
        total_columns: as in :func:`layer_gram`.

    Returns:
        ``[L, m]`` float64, with the accuracy of :func:`layer_gram`.

    Raises:
        TypeError: a dtype is not allowed.
        ValueError: a shape, a device, the offsets' values or the number of columns break the rules above.
    """
    _check.layers(rows, offsets, total_columns)
    _check.floating("step", step, (rows.shape[1],), beside=rows)
    dots: Tensor = torch.ops.fl_lightning.layer_dots(rows, step, offsets, total_columns)
    return dots


@torch.no_grad()
def layer_combine(rows: Tensor, offsets: Tensor, coeff: Tensor, out: Tensor | None = None) -> Tensor:
    """Linear combination of the rows with coefficients of their own for each layer.

    Products and sums run in float64, also for float32 coefficients; each element is rounded once, to the dtype of the
    result. A coefficient of 0 does not hide a NaN in its row.

    Args:
        rows: ``[m, n]``, at least one row.
        offsets: ``[L + 1]`` layer offsets.
        coeff: ``[L, m]`` of any floating-point dtype, on the CPU or the rows' device.
        out: if given, ``[n]`` on the rows' device, any floating-point dtype; the combination is added to it in place.
            It shares no memory with the rows.

    Returns:
        ``[n]``: a new tensor in the rows' dtype, or ``out``.

    Raises:
        TypeError: a dtype is not allowed.
        ValueError: a shape, a device or the offsets' values break the rules above, or ``out`` overlaps the rows.
    """
    _check.layers(rows, offsets)
    _check.floating("coeff", coeff, (offsets.shape[0] - 1, rows.shape[0]))
    _check.reachable("coeff", coeff, rows)
    if out is None:
        step: Tensor = torch.ops.fl_lightning.layer_combine(rows, offsets, coeff)
        return step
    _check.floating("out", out, (rows.shape[1],), beside=rows)
    torch.ops.fl_lightning.layer_combine_add(out, rows, offsets, coeff)
    return out


@torch.no_grad()
def layer_cross_combine(rows: Tensor, others: Tensor, offsets: Tensor, coeff: Tensor) -> Tensor:
    """Linear combination of rows and other rows (remembered updates), in one pass.

    Like :func:`layer_combine`, but rows with a coefficient of 0 in a layer are ignored there, NaN included.
    The op need not read what a layer does not use.

    Args:
        rows: ``[m, n]``, at least one row.
        others: ``[h, n]`` on the rows' device and in their dtype; ``h`` may be 0.
        offsets: ``[L + 1]`` layer offsets.
        coeff: ``[L, m + h]`` of any floating-point dtype, on the CPU or the rows' device; those of ``rows`` come first.

    Returns:
        ``[n]`` in the rows' dtype, each element rounded once.

    Raises:
        TypeError: a dtype is not allowed, or ``others`` has another one than ``rows``.
        ValueError: a shape, a device or the offsets' values break the rules above.
    """
    _check.layers(rows, offsets)
    _check.floating("others", others, (None, rows.shape[1]), beside=rows)
    _check.check_dtype("others", others, rows.dtype)
    _check.floating("coeff", coeff, (offsets.shape[0] - 1, rows.shape[0] + others.shape[0]))
    _check.reachable("coeff", coeff, rows)
    step: Tensor = torch.ops.fl_lightning.layer_cross_combine(rows, others, offsets, coeff)
    return step
