# SPDX-License-Identifier: Apache-2.0
"""Worker processes: copies of this process as it is, made by fork, which never outlive it.

Their messages, the memory that they share, and a pool of them with the queue from which they take their work.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import selectors
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.processes import end_with_parent, pack, unpack


@dataclass(frozen=True)
class WorkerProcess:
    """A worker process and the channel to it."""

    pid: int
    channel: Connection


def expect_forks() -> None:
    """Silences Python 3.12's warning of threads that do not exist in copies, which use none of them.

    Once per fit: warnings that are shown once would be shown again after every change of the filters.
    """
    if sys.version_info >= (3, 12):
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)


def start(target: Callable[[Connection], None], others: Iterable[WorkerProcess]) -> WorkerProcess:
    """Forks a process that runs ``target`` with its end of the channel, closes those of ``others``, and ends."""
    ours, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid > 0:
        theirs.close()
        return WorkerProcess(pid, ours)
    code = 1
    try:
        ours.close()
        for other in others:
            other.channel.close()
        _settle(parent)
        target(theirs)
        code = 0
    except (EOFError, ConnectionError, BrokenPipeError):
        pass  # the parent is gone, or has no more use for this process
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # not the parent's cleanup


def kill(worker: WorkerProcess) -> None:
    """Ends a worker, and what it has started; :func:`death` has to follow."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)  # before it has a group of its own


def stop(workers: Iterable[WorkerProcess]) -> None:
    """Ends workers at once, and what they have started."""
    workers = list(workers)
    for worker in workers:
        kill(worker)
        worker.channel.close()
    for worker in workers:
        death(worker)


def death(worker: WorkerProcess) -> str:
    """Waits for the end of a worker and says how it came about."""
    try:
        _, status = os.waitpid(worker.pid, 0)
    except ChildProcessError:
        return "ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hint = ": perhaps memory ran out" if number == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(number).name}{hint}"
    return f"ended with exit code {os.WEXITSTATUS(status)}"


def _settle(parent: int) -> None:
    """What a copy of a process needs before it can train."""
    # A group of its own: Ctrl-C in a terminal reaches the parent, which ends its workers.
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if callable(signal.getsignal(number)):  # handlers of the parent
            signal.signal(number, signal.SIG_IGN)
    end_with_parent(parent)
    keep_freed_memory()
    gc.freeze()  # what is there already stays: looking at it would copy its pages
    torch.set_num_threads(1)  # the parent's threads do not exist here


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of malloc.h


def keep_freed_memory() -> bool:
    """Lets glibc reuse large blocks, where by default each is given back to the system and faulted in anew.

    The environment variables MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_=2147483647 do the same from outside. Returns
    whether this holds now: on another C library nothing changes.
    """
    try:
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
    except OSError:
        library = None
    if library is None or not hasattr(library, "gnu_get_libc_version"):
        return False
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    return True


def send(channel: Connection, message: object) -> None:
    """Sends one message; nothing was sent if it cannot be pickled."""
    channel.send_bytes(pack(message))


def receive(channel: Connection) -> Any:
    """Waits for one message; EOFError or OSError: the other side is gone."""
    return unpack(channel.recv_bytes(), torch.device("cpu"))


def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory, zero at first, that processes forked from now on see as well, in both directions."""
    size = torch.Size(shape).numel()
    # Anonymous: no name to leak, no limit of a file system for shared memory.
    memory = mmap.mmap(-1, max(size, 1) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype)[:size].view(shape)


STOP = -1


@dataclass(frozen=True)
class WorkerReady:
    """A worker has started; ``obstacle`` says why it cannot train, if so."""

    obstacle: str = ""


@dataclass(frozen=True)
class RoundDone:
    """A worker's share of a round is over."""

    flaw: str = ""  # why what it has trained cannot be used


Target = Callable[[int, Connection, int], None]
"""Runs in a worker: its index, its channel, and the file descriptor of the queue."""


class WorkerPool:
    """Starts workers, gives them work, and hears of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: dict[int, WorkerProcess] = {}
        self._queue: tuple[int, int] | None = None
        self._ending: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._waiting = b""
        self.busy: set[int] = set()  # indices of the workers that are in the middle of a round

    def start(self, target: Target, places: Sequence[int]) -> None:
        """Makes new workers, which are copies of this process as it is now, and queues places for them."""
        self.stop()
        reading, writing = self._queue = os.pipe()
        os.set_blocking(writing, False)
        numbers = [*places, *[STOP] * self._size]
        self._waiting = b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)
        self._feed()

        def run(index: int, channel: Connection) -> None:
            os.close(writing)
            target(index, channel, reading)

        for index in range(self._size):
            self._workers[index] = worker = start(partial(run, index), self._workers.values())
            self._selector.register(worker.channel, selectors.EVENT_READ, index)
            self.busy.add(index)

    def _feed(self) -> None:
        """Fills the queue, which holds some thousand places."""
        assert self._queue is not None
        with contextlib.suppress(BlockingIOError):
            while self._waiting:
                written = os.write(self._queue[1], self._waiting[:4096])  # up to here, all or nothing
                self._waiting = self._waiting[written:]

    def messages(self, seconds: float | None = None) -> Iterator[tuple[int, Any]]:
        """Waits for workers, at most so long; yields their indices and messages, or as text how one has ended."""
        for key, _ in self._selector.select(seconds):
            index = key.data
            try:
                message = receive(self._workers[index].channel)
            except (EOFError, OSError):
                worker = self._workers.pop(index)
                self._selector.unregister(worker.channel)
                worker.channel.close()
                self.busy.discard(index)
                message = death(worker)
            if isinstance(message, RoundDone):
                self.busy.discard(index)
            yield index, message
        if self._waiting:
            self._feed()

    def kill(self, index: int) -> None:
        """Ends one worker; :meth:`messages` will tell."""
        kill(self._workers[index])

    def release(self) -> None:
        """Lets workers that are done end by themselves: a large process takes milliseconds to go away."""
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            self._selector.unregister(worker.channel)
            self._ending.append(worker)

    def stop(self) -> None:
        """Ends all workers at once, and waits until they are gone."""
        self.release()
        stop(self._ending)
        self._ending = []
        self.busy, self._waiting = set(), b""
        if self._queue is not None:
            for descriptor in self._queue:
                os.close(descriptor)
            self._queue = None
