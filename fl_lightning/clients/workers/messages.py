# SPDX-License-Identifier: Apache-2.0
"""Messages between processes, and memory that both sides see."""

from __future__ import annotations

import mmap
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.tensor_bytes import pack, unpack


def send(channel: Connection, message: object) -> None:
    """Sends one message.

    Raises:
        Exception: it cannot be pickled; nothing was sent then.
    """
    channel.send_bytes(pack(message))


def receive(channel: Connection) -> Any:
    """Waits for one message.

    Raises:
        EOFError: the other side is gone.
        OSError: the other side is gone.
    """
    return unpack(channel.recv_bytes(), torch.device("cpu"))


def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory, zero at first, that processes forked from now on see as well, in both directions."""
    size = torch.Size(shape).numel()
    # Anonymous: no name to leak, no limit of a file system for shared memory.
    memory = mmap.mmap(-1, max(size, 1) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype)[:size].view(shape)
