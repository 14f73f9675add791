# SPDX-License-Identifier: Apache-2.0
"""Digests of tensors, arrays and texts, the same on every machine."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

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


def checksums(value: Any, name: str, apart: Collection[str] = ()) -> dict[str, int]:
    """A number for everything in a nest of mappings and lists, by where it lies: equal nests have equal ones."""
    if name in apart:
        return {}
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
        found |= checksums(part, f"{name}.{key}", apart)
    return found
