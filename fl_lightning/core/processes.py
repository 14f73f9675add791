# SPDX-License-Identifier: Apache-2.0
"""What processes that work together need: objects as bytes, fair shares of the work, copies, and a common end."""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import heapq
import io
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

# ---- bytes, for many small tensors


def pack(value: object) -> bytes:
    """The bytes of an object. Tensors keep their memory formats, and come from a GPU to that of who unpacks them.

    A file of ``torch.save`` has an entry of more than a kilobyte for each tensor, and reading it takes some ten times
    as long as reading these bytes.
    """
    buffer = io.BytesIO()
    packer = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    packer.dispatch_table = _TABLE
    packer.dump(value)
    return buffer.getvalue()


def unpack(packed: bytes, device: torch.device) -> Any:
    """What :func:`pack` packed; the bytes of a stranger can run any code."""
    unpacker = _Unpacker(io.BytesIO(packed))
    unpacker.device = device
    return unpacker.load()


class _Unpacker(pickle.Unpickler):
    device: torch.device

    def find_class(self, module: str, name: str) -> Any:
        """Tells tensors where to go."""
        found: Callable[..., Any] = super().find_class(module, name)
        return partial(found, self.device) if found is _tensor else found


def _reduced(tensor: Tensor) -> Any:
    """What to pickle of a tensor: torch's own way takes a hundred microseconds, as long as a small local step."""
    if tensor.layout is not torch.strided:
        file = io.BytesIO()  # pickle's own way leaves them in a list of torch's that its next load goes through
        torch.save(tensor, file)
        return _loaded, (file.getvalue(),)
    if tensor.is_quantized:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    values = tensor.detach().resolve_conj().resolve_neg().cpu()
    order = tuple(range(values.dim()))
    if not values.is_contiguous():
        by_stride = tuple(sorted(order, key=values.stride, reverse=True))
        order = by_stride if values.permute(by_stride).is_contiguous() else order
    flat = values.permute(order).contiguous().view(-1)
    content = bytearray(flat.view(torch.uint8).numpy().data) if flat.numel() else bytearray()
    kind = isinstance(tensor, nn.Parameter), tensor.requires_grad, tensor.device.type == "cpu"
    return _tensor, (content, tensor.dtype, tuple(tensor.shape), order, *kind)


_TABLE = {**copyreg.dispatch_table, Tensor: _reduced, nn.Parameter: _reduced}  # of exact types


def _loaded(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def _tensor(
    device: torch.device,
    content: bytearray,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    order: tuple[int, ...],
    is_parameter: bool,
    requires_grad: bool,
    on_cpu: bool,
) -> Tensor:
    values = torch.empty(shape, dtype=dtype)
    if content:
        flat = torch.frombuffer(content, dtype=dtype).clone()  # to a 64-byte boundary, where the bytes do not start
        places = [order.index(dimension) for dimension in range(len(order))]
        values = flat.view([shape[dimension] for dimension in order]).permute(places)
    values = values if on_cpu else values.to(device)
    return nn.Parameter(values, requires_grad) if is_parameter else values.requires_grad_(requires_grad)


# ---- work and ends


def balanced_split(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Clients per rank, ascending, whose costs differ little: the dearest first, each to whoever has least."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for client in sorted((c for c, cost in enumerate(costs) if cost), key=lambda client: (-costs[client], client)):
        load, rank = heapq.heappop(loads)
        found[rank].append(client)
        heapq.heappush(loads, (load + costs[client], rank))
    return [sorted(clients) for clients in found]


_PDEATHSIG = 1  # of prctl
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt


def end_with_parent(parent: int) -> None:
    """The system kills this process when its parent ends, however that comes about; at once if it has ended."""
    _at_parents_death(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the system was told
        os._exit(1)


def outlive_parent() -> None:
    """From here on this process lives on if its parent ends."""
    _at_parents_death(0)


def _at_parents_death(number: int) -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "prctl"):
        library.prctl(_PDEATHSIG, number)


# ---- copies


class Fork:
    """A copy of this process that serves over a channel, with one thread, and ends with this process."""

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("fork")
        self.channel, theirs = context.Pipe()
        self._process = context.Process(target=self._run, args=(serve, theirs, os.getpid()))
        self._process.start()
        theirs.close()

    def _run(self, serve: Callable[[Connection], None], channel: Connection, parent: int) -> None:
        # A group of its own: Ctrl-C in a terminal reaches the parent, which ends its copies.
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            if callable(signal.getsignal(number)):  # handlers of the parent
                signal.signal(number, signal.SIG_IGN)
        end_with_parent(parent)
        self.channel.close()
        torch.set_num_threads(1)  # the parent's threads do not exist here
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt"):  # glibc keeps what is freed: CNNs take 14 % less processor time in Parallel
            library.mallopt(_MMAP_MAX, 0)
            library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone, or has no more use for this process
            serve(channel)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(0)  # not the cleanup of its parent

    def kill(self) -> None:
        """Ends it at once, and what it has started; :meth:`end` has to follow."""
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            self._process.kill()

    def end(self) -> str:
        """Waits for its end and says how it came about."""
        self._process.join()
        code = self._process.exitcode or 0
        if code < 0:
            hint = ": perhaps memory ran out" if -code == signal.SIGKILL else ""
            return f"was killed by {signal.Signals(-code).name}{hint}"
        return f"ended with exit code {code}"


def stop(copies: Iterable[Fork]) -> None:
    """Ends copies of this process at once, and what they have started; some may have ended."""
    forks = list(copies)
    for fork in forks:
        fork.kill()
        fork.channel.close()
    for fork in forks:
        fork.end()
