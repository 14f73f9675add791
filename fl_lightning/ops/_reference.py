# SPDX-License-Identifier: Apache-2.0
"""Pure-torch implementations. They define what every op computes, on any device.

Sums run in float64, over columns in the order of :mod:`fl_lightning.ops.slices`. Rows are converted one block of
columns at a time into one reused buffer, so that a block stays in the processor's cache and no float64 copy of the
matrix exists. Blocks are taken in a fixed order. Where a library might divide a sum among threads, matrix products are
kept to shapes that none divides, and other sums are made of elementwise additions, so results do not depend on the
number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from fl_lightning.ops.rows import accumulation_device, rounded
from fl_lightning.ops.slices import add_tree, slice_columns

_CPU_BLOCK = 1 << 18  # elements of a float64 block: 2 MiB, about a core's share of cache
_DEVICE_BLOCK = 1 << 24
_MIN_COLUMNS = 2048
_STRIP = 2  # rows per matrix product: with more, BLAS libraries divide long sums among threads
_WORD = 32  # keep bits per int32 word
_INT32_MAX = 2**31 - 1


def layer_gram(rows: Tensor, offsets: Tensor, total_columns: int | None = None) -> Tensor:
    """See :func:`fl_lightning.ops.layer_gram`."""
    m = rows.shape[0]
    wide = _Wide(rows)

    def add(gram: Tensor, start: int, stop: int) -> None:
        block = wide(rows[:, start:stop])
        for row in range(0, m, _STRIP):
            gram[row : row + _STRIP, row:].addmm_(block[row : row + _STRIP], block[row:].T)

    gram = _layer_sums(add, (m, m), offsets, total_columns, rows)
    return gram.triu_().add_(gram.triu(1).transpose(1, 2))


def layer_squares(rows: Tensor, offsets: Tensor, total_columns: int | None = None) -> Tensor:
    """See :func:`fl_lightning.ops.layer_squares`."""
    squares = _zeros(rows, offsets.shape[0] - 1, rows.shape[0])
    for place in range(rows.shape[0]):
        squares[:, place] = layer_gram(rows[place : place + 1], offsets, total_columns)[:, 0, 0]
    return squares


def layer_cross_gram(rows: Tensor, others: Tensor, offsets: Tensor, total_columns: int | None = None) -> Tensor:
    """See :func:`fl_lightning.ops.layer_cross_gram`."""
    wide, wide_others = _Wide(rows), _Wide(others)

    def add(gram: Tensor, start: int, stop: int) -> None:
        block, other = wide(rows[:, start:stop]), wide_others(others[:, start:stop])
        for row in range(0, rows.shape[0], _STRIP):
            gram[row : row + _STRIP].addmm_(block[row : row + _STRIP], other.T)

    return _layer_sums(add, (rows.shape[0], others.shape[0]), offsets, total_columns, rows, others)


def layer_chosen_gram(
    rows: Tensor, others: Tensor, offsets: Tensor, chosen: Tensor, total_columns: int | None = None
) -> Tensor:
    """See :func:`fl_lightning.ops.layer_cross_gram`, with ``chosen``. On a device by its kernel for all rows."""
    if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < others.shape[0]:
        raise ValueError(f"chosen must lie between 0 and {others.shape[0] - 1}, found {chosen.tolist()}")
    gram: Tensor = torch.ops.fl_lightning.layer_cross_gram(rows, others, offsets, total_columns)
    # Their numbers stay on the host: an index tensor would have to be copied, and the copy waits for the device.
    parts = [gram.narrow(2, other, 1) for other in chosen.tolist()]
    return torch.cat(parts, 2) if parts else gram[:, :, :0]


def layer_dots(rows: Tensor, step: Tensor, offsets: Tensor, total_columns: int | None = None) -> Tensor:
    """See :func:`fl_lightning.ops.layer_dots`."""
    wide, wide_step = _Wide(rows), _Wide(step)

    def add(dots: Tensor, start: int, stop: int) -> None:
        dots.add_(_halved(wide(rows[:, start:stop]).mul_(wide_step(step[start:stop]))))

    return _layer_sums(add, (rows.shape[0],), offsets, total_columns, rows)


def layer_combine(rows: Tensor, offsets: Tensor, coeff: Tensor) -> Tensor:
    """See :func:`fl_lightning.ops.layer_combine`, without ``out``."""
    step = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device)
    for start, stop, block in _combined(rows, offsets, coeff):
        step[start:stop] = rounded(block, step.dtype)
    return step


def layer_cross_combine(rows: Tensor, others: Tensor, offsets: Tensor, coeff: Tensor) -> Tensor:
    """See :func:`fl_lightning.ops.layer_cross_combine`."""
    m = rows.shape[0]
    step = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device)
    wide, wide_others = _Wide(rows), _Wide(others)
    coeff = coeff.to(wide.device).double()
    unused = (coeff == 0)[:, :, None]
    for layer, start, stop in _blocks(offsets, rows, others):
        own = wide(rows[:, start:stop]).masked_fill_(unused[layer, :m], 0.0)
        other = wide_others(others[:, start:stop]).masked_fill_(unused[layer, m:], 0.0)
        block = torch.mv(own.T, coeff[layer, :m]).addmv_(other.T, coeff[layer, m:])
        step[start:stop] = rounded(block, step.dtype)
    return step


def layer_combine_add(out: Tensor, rows: Tensor, offsets: Tensor, coeff: Tensor) -> None:
    """See :func:`fl_lightning.ops.layer_combine`, with ``out``."""
    if rows.shape[0] == 0:
        raise ValueError(f"rows must have shape [m, n] with at least one row, found {list(rows.shape)}")
    _require_apart("out", out, rows)
    for start, stop, block in _combined(rows, offsets, coeff):
        part = out[start:stop]
        part.copy_(rounded(block.add_(part.to(block.device)), part.dtype))


def puc_track(
    row: Tensor, counts: Tensor, threshold: int, participations: int, offsets: Tensor, total_columns: int | None = None
) -> tuple[Tensor, Tensor]:
    """See :func:`fl_lightning.ops.puc_track`."""
    n = row.shape[0]
    _require_apart("counts", counts, row[None])
    wide = _Wide(row)
    kept = torch.zeros(-(-n // _WORD) * _WORD, dtype=torch.bool, device=row.device)

    def add(square: Tensor, start: int, stop: int) -> None:
        values, count = row[start:stop], counts[start:stop]
        increase = values <= 0
        past = count.to(torch.int32)
        keep = torch.where(increase, past, participations - past) >= min(threshold, _INT32_MAX)
        count.add_(increase)
        kept[start:stop] = keep
        square.add_(_halved(wide(values.masked_fill(~keep, 0.0)).square_()))

    norms = _layer_sums(add, (), offsets, total_columns, row[None])
    return _pack(kept), norms


def puc_combine(rows: Tensor, keep: Tensor, weights: Tensor) -> Tensor:
    """See :func:`fl_lightning.ops.puc_combine`."""
    if weights.device.type == "cpu" and not bool((weights > 0).all()):
        raise ValueError(f"weights must be positive, found {weights.tolist()}")
    n = rows.shape[1]
    step = torch.empty(n, dtype=rows.dtype, device=rows.device)
    wide, wide_bits = _Wide(rows), _Wide(rows)
    weights = weights.to(wide.device).double()
    columns = _columns(2 * rows.shape[0], rows.device)
    for start in range(0, n, columns):
        stop = min(n, start + columns)
        bits = _unpack(keep[:, start // _WORD : -(-stop // _WORD)])[:, : stop - start].to(wide.device)
        block = wide(rows[:, start:stop]).masked_fill_(bits == 0, 0.0)
        mean = torch.mv(block.T, weights).div_(torch.mv(wide_bits(bits).T, weights))
        step[start:stop] = rounded(mean.masked_fill_(~bits.any(0), 0.0), step.dtype)
    return step


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


class _Wide:
    """Converts blocks to float64 in a buffer of its own that the next block overwrites."""

    def __init__(self, like: Tensor) -> None:
        self.device = accumulation_device(like)
        self._buffer = torch.empty(0, dtype=torch.float64, device=self.device)

    def __call__(self, block: Tensor) -> Tensor:
        if block.numel() > self._buffer.numel():
            self._buffer = self._buffer.new_empty(block.numel())
        return self._buffer[: block.numel()].view(block.shape).copy_(block)


def _require_apart(name: str, out: Tensor, rows: Tensor) -> None:
    """Refuses to write where an argument is read, and to two elements in one place, as PyTorch's ops in place do."""
    if out.numel() > 1 and out.stride(0) == 0:
        raise ValueError(f"{name} must have one place in memory for each element")
    if not out.is_contiguous() or (rows.shape[1] > 1 and rows.stride(1) != 1):
        return  # such arguments may interleave, and compiled kernels copy them first
    begin, size = out.data_ptr(), rows.shape[1] * rows.element_size()
    starts = [rows.data_ptr() + i * rows.stride(0) * rows.element_size() for i in range(rows.shape[0])]
    if any(begin < start + size and start < begin + out.numel() * out.element_size() for start in starts):
        raise ValueError(f"{name} must share no memory with the rows")


def _zeros(rows: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=accumulation_device(rows))


def _columns(rows: int, device: torch.device) -> int:
    """Columns per block, a multiple of the word length."""
    budget = _CPU_BLOCK if device.type == "cpu" else _DEVICE_BLOCK
    return max(_MIN_COLUMNS, budget // max(rows, 1) // _WORD * _WORD)


def _starts(offsets: Tensor, n: int) -> list[int]:
    """Raises ValueError unless the offsets rise from 0 to the number of columns."""
    starts: list[int] = offsets.tolist()
    if starts[0] != 0 or starts[-1] != n or any(a > b for a, b in pairwise(starts)):
        raise ValueError(f"offsets must rise from 0 to n = {n} without decreasing, found {starts}")
    return starts


def _blocks(offsets: Tensor, *matrices: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields (layer, start, stop) in increasing order; no block crosses a layer."""
    starts = _starts(offsets, matrices[0].shape[1])
    columns = _columns(sum(matrix.shape[0] for matrix in matrices), matrices[0].device)
    for layer, (start, stop) in enumerate(pairwise(starts)):
        for begin in range(start, stop, columns):
            yield layer, begin, min(begin + columns, stop)


def _layer_sums(
    add: Callable[[Tensor, int, int], None],
    shape: tuple[int, ...],
    offsets: Tensor,
    total_columns: int | None,
    *matrices: Tensor,
) -> Tensor:
    """Sums over the columns of each layer, ``[L, *shape]``: ``add(total, start, stop)`` adds what a block gives."""
    n = matrices[0].shape[1]
    total_columns = n if total_columns is None else total_columns
    width = slice_columns(total_columns)
    columns = _columns(sum(matrix.shape[0] for matrix in matrices), matrices[0].device)
    starts = _starts(offsets, n)
    sums = _zeros(matrices[0], len(starts) - 1, *shape)

    def of_slice(begin: int, end: int) -> Tensor:
        total = sums.new_zeros(shape)
        for start in range(begin, end, columns):
            add(total, start, min(start + columns, end))
        return total

    for total, (begin, end) in zip(sums, pairwise(starts), strict=True):
        if begin < end:
            spans = [(start, start + width) for start in range(begin // width * width, end, width)]
            parts = (of_slice(max(begin, start), min(end, stop)) for start, stop in spans)
            total.copy_(add_tree(spans, parts, total_columns))
    return sums.add_(0.0)  # -0.0 is 0.0, as it is where another part of the tree adds its nothing


def _halved(terms: Tensor) -> Tensor:
    """Sums over the last dimension, the second half added to the first until one is left; the terms are overwritten."""
    count = terms.shape[-1]
    while count > 1:
        half = (count + 1) // 2
        terms[..., : count - half].add_(terms[..., half:count])
        count = half
    return terms[..., 0]


def _combined(rows: Tensor, offsets: Tensor, coeff: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    wide = _Wide(rows)
    coeff = coeff.to(wide.device).double()
    for layer, start, stop in _blocks(offsets, rows):
        total = torch.zeros(stop - start, dtype=torch.float64, device=wide.device)
        for row in wide(rows[:, start:stop]).mul_(coeff[layer][:, None]):  # in the kernels' order
            total.add_(row)
        yield start, stop, total


def _pack(kept: Tensor) -> Tensor:
    shifts = torch.arange(_WORD, dtype=torch.int32, device=kept.device)
    words = kept.view(-1, _WORD)
    packed = torch.empty(words.shape[0], dtype=torch.int32, device=kept.device)
    size = _columns(_WORD, kept.device)
    for start in range(0, words.shape[0], size):
        block = words[start : start + size].to(torch.int32)
        packed[start : start + size] = (block << shifts).sum(1, dtype=torch.int32)
    return packed


def _unpack(words: Tensor) -> Tensor:
    """The bits of ``[..., w]`` words as int32 zeros and ones, ``[..., 32 w]``."""
    shifts = torch.arange(_WORD, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts).bitwise_and_(1).flatten(-2)
