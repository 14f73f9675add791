# SPDX-License-Identifier: Apache-2.0
"""Memory in which tensors start at 64-byte boundaries, a look for NaN and infinity, and digests.

Matrix products of BLAS may round differently where a matrix starts elsewhere in memory. PyTorch places fresh tensors
at such boundaries, and tensors that are parts of larger ones have to be placed by hand.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

K = TypeVar("K")

foreach_add_, foreach_copy_, foreach_mul_ = torch._foreach_add_, torch._foreach_copy_, torch._foreach_mul_
foreach_sub = torch._foreach_sub

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


def first_rows(rows: Tensor, number: int) -> Tensor:
    """The first of :func:`empty_rows`, in memory that ends with them: a file holds all memory of what it saves."""
    memory = rows.untyped_storage()[: number * rows.stride(0) * rows.itemsize]
    return rows.new_empty(0).set_(memory, 0, (number, rows.shape[1]), rows.stride())


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


def memory_of(value: Tensor) -> int | None:
    """Where the storage of a tensor lies; ``None`` if it has none, or torch does not say."""
    try:
        return value.untyped_storage().data_ptr() or None
    except (RuntimeError, ValueError):  # sparse, or a lazy parameter
        return None


def span_of(value: Tensor) -> tuple[int, int]:
    """The first byte of a tensor that has a storage, and the one behind its last."""
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (reach + 1) * value.element_size() * bool(value.numel())


# ---- NaN and infinity, in one pass and without a mask of the tensors' size


def all_finite(values: Tensor) -> Tensor:
    """A boolean scalar beside the values; true for none at all and for integers."""
    if values.numel() == 0 or not values.is_floating_point():
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.stack(values.aminmax()).isfinite().all()  # NaN passes through both


def not_finite(named: Mapping[K, Tensor]) -> list[K]:
    """The keys of the tensors that hold NaN or infinity, in order; each device is asked once if there are none."""
    flags: dict[torch.device, list[Tensor]] = {}
    for value in named.values():
        flags.setdefault(value.device, []).append(all_finite(value))
    if all(bool(torch.stack(some).all()) for some in flags.values()):
        return []
    return [name for name, value in named.items() if not bool(all_finite(value))]


# ---- digests, the same on every machine

DIGEST = "blake2b:"
"""How digests begin."""


def digest(*parts: Tensor | np.ndarray[Any, Any] | str) -> str:
    """One digest of all parts, dtypes and shapes included."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Tensor):
            dtype, raw = str(part.dtype), part.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        elif isinstance(part, str) or part.dtype.kind == "O":
            dtype, raw = "text", np.frombuffer(str(part if isinstance(part, str) else part.tolist()).encode(), np.uint8)
        else:
            dtype, raw = str(part.dtype), np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        found.update(f"{dtype} {tuple(getattr(part, 'shape', ()))} {len(raw)} ".encode())
        found.update(raw.data)
    return DIGEST + found.hexdigest()


def checksum(tensor: Tensor) -> int:
    """A sum over a tensor's bits modulo 2^64, computed where the tensor lies; equal tensors have equal ones.

    Where a vector is cut at multiples of eight bytes, the parts' sums add up to its own.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    words = len(raw) // 8 * 8
    total = int(raw[:words].view(torch.int64).sum())
    if words < len(raw):
        last = raw.new_zeros(8)
        last[: len(raw) - words] = raw[words:]
        total += int(last.view(torch.int64))
    return total % 2**64


def checksums(value: Any, name: str) -> dict[str, int]:
    """A number for everything in a nest of mappings and lists, by where it lies: equal nests have equal ones."""
    if isinstance(value, Tensor):
        return {name: checksum(torch.view_as_real(value) if value.is_complex() else value)}
    if isinstance(value, Mapping):
        parts: Any = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    else:
        return {name: zlib.crc32(repr(value).encode())}
    found = {name: len(value)}
    for key, part in parts:
        found |= checksums(part, f"{name}.{key}")
    return found
