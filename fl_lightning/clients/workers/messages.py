# SPDX-License-Identifier: Apache-2.0
"""Messages between processes: pickled objects whose tensors travel as plain bytes, and memory that both sides see."""

from __future__ import annotations

import copyreg
import io
import mmap
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor


def send(channel: Connection, message: object) -> None:
    """Sends one message.

    Raises:
        Exception: it cannot be pickled; nothing was sent then.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = _TABLE
    pickler.dump(message)
    channel.send_bytes(buffer.getbuffer())


def receive(channel: Connection) -> Any:
    """Waits for one message.

    Raises:
        EOFError: the other side is gone.
        OSError: the other side is gone.
    """
    return pickle.loads(channel.recv_bytes())


def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory, zero at first, that processes forked from now on see as well, in both directions."""
    size = torch.Size(shape).numel()
    # Anonymous: no name to leak, no limit of a file system for shared memory.
    memory = mmap.mmap(-1, max(size, 1) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype)[:size].view(shape)


def _reduced(tensor: Tensor) -> Any:
    """What to pickle of a tensor: torch's own way takes a hundred microseconds, as long as a small local step."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.requires_grad:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    # Other memory formats than the usual one travel as they are.
    order = tuple(range(tensor.dim()))
    if not tensor.is_contiguous():
        order = tuple(sorted(order, key=tensor.stride, reverse=True))
        if not tensor.permute(order).is_contiguous():
            return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    flat = tensor.permute(order).reshape(-1).resolve_conj().resolve_neg()
    content = bytearray(flat.view(torch.uint8).numpy().data) if flat.numel() else bytearray()
    return _rebuilt, (content, tensor.dtype, tuple(tensor.shape), order)


_TABLE = {**copyreg.dispatch_table, Tensor: _reduced}  # of exact types: parameters go torch's way


def _rebuilt(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(content, dtype=dtype).clone()  # to a 64-byte boundary, where the bytes do not start
    places = [order.index(dimension) for dimension in range(len(order))]
    return flat.view([shape[dimension] for dimension in order]).permute(places)
