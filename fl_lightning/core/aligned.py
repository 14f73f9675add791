# SPDX-License-Identifier: Apache-2.0
"""Memory in which every row and every tensor starts at a 64-byte boundary.

Matrix products of BLAS may round differently where a matrix starts elsewhere in memory. PyTorch places fresh tensors
at such boundaries, and tensors that are parts of larger ones have to be placed by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes: a line of the processor's cache, and what PyTorch gives to fresh tensors at least."""


def padded(count: int, dtype: torch.dtype) -> int:
    """The smallest number of elements from ``count`` on that fills whole lines of 64 bytes."""
    line = ALIGNMENT // dtype.itemsize
    return -(-count // line) * line


def empty_rows(number: int, like: Tensor, device: torch.device | None = None) -> Tensor:
    """Uninitialised memory ``[number, n]`` as ``like`` ``[..., n]`` has it; rows are contiguous, from boundaries on."""
    n, device = like.shape[-1], device or like.device
    return torch.empty(number, padded(n, like.dtype), dtype=like.dtype, device=device)[:, :n]


def empty_tensors(shapes: Sequence[Sequence[int]], like: Tensor) -> list[Tensor]:
    """Uninitialised contiguous tensors of these shapes in one block of memory; each starts at a boundary."""
    sizes = [padded(prod(shape), like.dtype) for shape in shapes]
    block = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
    starts = accumulate(sizes, initial=0)
    return [block[start : start + prod(shape)].view(tuple(shape)) for start, shape in zip(starts, shapes, strict=False)]


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if it is not contiguous or does not start at a boundary."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
