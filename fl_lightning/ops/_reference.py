# SPDX-License-Identifier: Apache-2.0
"""Pure-torch implementations. They define what every op computes, on any device.

Sums run in float64. Rows are converted one block of columns at a time, so that a block stays in the processor's cache
and no float64 copy of the matrix exists. Blocks are taken in a fixed order: the result does not depend on the number of
threads wherever the BLAS library's does not for one block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_CPU_BLOCK = 1 << 17  # elements of one float64 block: 1 MiB, about a core's second-level cache
_DEVICE_BLOCK = 1 << 24
_MIN_COLUMNS = 2048
_WORD = 32  # keep bits per int32 word


def accumulation_device(rows: Tensor) -> torch.device:
    """Where float64 results about ``rows`` live: beside them, or on the CPU where the device has no float64."""
    return torch.device("cpu") if rows.device.type == "mps" else rows.device


def layer_gram(rows: Tensor, offsets: Tensor) -> Tensor:
    """See :func:`fl_lightning.ops.layer_gram`."""
    m = rows.shape[0]
    device = accumulation_device(rows)
    gram = torch.zeros(offsets.numel() - 1, m, m, dtype=torch.float64, device=device)
    for layer, start, stop in _blocks(offsets, rows.shape[1], m, rows.device):
        block = _wide(rows[:, start:stop], device)
        gram[layer].addmm_(block, block.T)
    # BLAS does not promise the same rounding on both sides of the diagonal, and solvers want symmetry to be exact.
    return gram.triu_().add_(gram.triu(1).transpose(1, 2))


def layer_cross_gram(rows: Tensor, others: Tensor, offsets: Tensor) -> Tensor:
    """See :func:`fl_lightning.ops.layer_cross_gram`."""
    m, h = rows.shape[0], others.shape[0]
    device = accumulation_device(rows)
    gram = torch.zeros(offsets.numel() - 1, m, h, dtype=torch.float64, device=device)
    for layer, start, stop in _blocks(offsets, rows.shape[1], m + h, rows.device):
        gram[layer].addmm_(_wide(rows[:, start:stop], device), _wide(others[:, start:stop], device).T)
    return gram


def layer_dots(rows: Tensor, step: Tensor, offsets: Tensor) -> Tensor:
    """See :func:`fl_lightning.ops.layer_dots`."""
    m = rows.shape[0]
    device = accumulation_device(rows)
    dots = torch.zeros(offsets.numel() - 1, m, dtype=torch.float64, device=device)
    for layer, start, stop in _blocks(offsets, rows.shape[1], m, rows.device):
        dots[layer].addmv_(_wide(rows[:, start:stop], device), _wide(step[start:stop], device))
    return dots


def layer_combine(rows: Tensor, offsets: Tensor, coeff: Tensor) -> Tensor:
    """See :func:`fl_lightning.ops.layer_combine`, without ``out``."""
    step = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device)
    for start, stop, block in _combined(rows, offsets, coeff):
        step[start:stop] = block
    return step


def layer_combine_add(out: Tensor, rows: Tensor, offsets: Tensor, coeff: Tensor) -> None:
    """See :func:`fl_lightning.ops.layer_combine`, with ``out``."""
    for start, stop, block in _combined(rows, offsets, coeff):
        part = out[start:stop]
        part.copy_(block.add_(part.to(block.device)))


def project_conflicts(gram: Tensor, order: Tensor, keep: Tensor) -> Tensor:
    """See :func:`fl_lightning.ops.project_conflicts`."""
    m = gram.shape[-1]
    if order.device.type == "cpu" and order.sort().values.tolist() != list(range(m)):
        raise ValueError(f"order must be a permutation of 0..{m - 1}, found {order.tolist()}")
    order, keep = order.to(gram.device), keep.to(gram.device)
    coeff = torch.eye(m, dtype=gram.dtype, device=gram.device).repeat(gram.shape[0], 1, 1)
    products = gram.clone()  # products[b, i, j]: projected update i with original update j
    squares = gram.diagonal(dim1=1, dim2=2)
    clients = torch.arange(m, device=gram.device)
    for position in range(m):
        target = order[position : position + 1]
        square = squares.index_select(1, target)
        dots = products.index_select(2, target)[:, :, 0]
        # ~(dots >= 0) instead of dots < 0: a NaN product must show in the result, not count as "no conflict".
        conflict = ~(dots >= 0) & ~(square <= 0) & ~keep & (clients != target)
        share = torch.where(conflict, dots / square, 0.0)[:, :, None]
        coeff.index_add_(2, target, share, alpha=-1)
        products.addcmul_(share, gram.index_select(1, target), value=-1)
    return coeff


def puc_track(
    row: Tensor, counts: Tensor, threshold: int, participations: int, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`fl_lightning.ops.puc_track`."""
    n = row.shape[0]
    device = accumulation_device(row)
    norms = torch.zeros(offsets.numel() - 1, dtype=torch.float64, device=device)
    kept = torch.zeros(-(-n // _WORD) * _WORD, dtype=torch.bool, device=row.device)
    for layer, start, stop in _blocks(offsets, n, 1, row.device):
        values, count = row[start:stop], counts[start:stop]
        increase = values <= 0
        past = count.to(torch.int32)
        keep = torch.where(increase, past, participations - past) >= threshold
        count.add_(increase.to(count.dtype))
        kept[start:stop] = keep
        masked = _wide(torch.where(keep, values, 0.0), device)
        norms[layer] += masked.dot(masked)
    return _pack(kept), norms


def puc_combine(rows: Tensor, keep: Tensor, weights: Tensor) -> Tensor:
    """See :func:`fl_lightning.ops.puc_combine`."""
    m, n = rows.shape
    device = accumulation_device(rows)
    weights = weights.to(device)
    step = torch.empty(n, dtype=rows.dtype, device=rows.device)
    columns = _columns(4 * m, rows.device)
    for start in range(0, n, columns):
        stop = min(n, start + columns)
        bits = _unpack(keep[:, start // _WORD : -(-stop // _WORD)])[:, : stop - start].to(device)
        wide = _wide(rows[:, start:stop], device)
        numerator = wide.new_zeros(stop - start)
        denominator = torch.zeros_like(numerator)
        for client in range(m):
            numerator += weights[client] * torch.where(bits[client], wide[client], 0.0)
            denominator += weights[client] * bits[client]
        step[start:stop] = torch.where(bits.any(0), numerator / denominator, 0.0)
    return step


def _columns(rows: int, device: torch.device) -> int:
    """Columns per block, a multiple of the word length."""
    budget = _CPU_BLOCK if device.type == "cpu" else _DEVICE_BLOCK
    return max(_MIN_COLUMNS, budget // max(rows, 1) // _WORD * _WORD)


def _blocks(offsets: Tensor, n: int, rows: int, device: torch.device) -> Iterator[tuple[int, int, int]]:
    """Yields (layer, start, stop) in increasing order; no block crosses a layer.

    Raises:
        ValueError: offsets do not rise from 0 to ``n``.
    """
    starts: list[int] = offsets.tolist()
    if starts[0] != 0 or starts[-1] != n or any(a > b for a, b in zip(starts, starts[1:], strict=False)):
        raise ValueError(f"offsets must rise from 0 to n = {n} without decreasing, found {starts}")
    columns = _columns(rows, device)
    for layer, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        for begin in range(start, stop, columns):
            yield layer, begin, min(begin + columns, stop)


def _combined(rows: Tensor, offsets: Tensor, coeff: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    device = accumulation_device(rows)
    coeff = coeff.to(device=device, dtype=torch.float64)
    for layer, start, stop in _blocks(offsets, rows.shape[1], rows.shape[0], rows.device):
        yield start, stop, torch.mv(_wide(rows[:, start:stop], device).T, coeff[layer])


def _wide(block: Tensor, device: torch.device) -> Tensor:
    return block.to(device=device).to(torch.float64)


def _pack(kept: Tensor) -> Tensor:
    shifts = torch.arange(_WORD, dtype=torch.int32, device=kept.device)
    words = kept.view(-1, _WORD)
    packed = torch.empty(words.shape[0], dtype=torch.int32, device=kept.device)
    columns = _columns(_WORD, kept.device)
    for start in range(0, words.shape[0], columns):
        block = words[start : start + columns].to(torch.int32)
        packed[start : start + columns] = (block << shifts).sum(1, dtype=torch.int32)
    return packed


def _unpack(words: Tensor) -> Tensor:
    shifts = torch.arange(_WORD, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 1).bool().flatten(-2)
