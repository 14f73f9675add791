# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at best, measured in the same run as the ops: reading memory, and fused multiply-adds."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._kernels.timing import seconds

_SOURCE = Path(__file__).with_name("limits.cpp")
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-fPIC", "-fopenmp")
_ENOUGH = 5e-4  # seconds of reading per measurement: the start of a thread must not count


class Limits:
    """Measures limits on one device.

    On the CPU, loops in C++ compiled on the spot; without a compiler, torch's sum and matrix product. On a GPU, the
    device's copy and float32 matrix product without TF32.

    Attributes:
        how: what was measured, in words.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._library = _build() if device.type == "cpu" else None
        if device.type != "cpu":
            self.how = "bandwidth: half of a device copy's bytes written and half read; peak: float32 matmul, no TF32"
        elif self._library is None:
            self.how = "no compiler: bandwidth is that of torch.sum, peak that of the best of torch's matrix products"
        else:
            self.how = (
                "bandwidth: a loop that only reads, the same matrix in the same state of the caches, in turn with the "
                "op; peak: a loop of float32 multiply-adds on registers, all threads at once"
            )

    def read_once(self, rows: Tensor) -> Callable[[], float]:
        """A function that measures the seconds for reading all of a contiguous tensor once."""
        size = rows.numel() * rows.element_size()
        if self._library is not None:
            read, threads = self._library.read_once, torch.get_num_threads()
            first: float = read(rows.data_ptr(), size, threads, 1)
            times = max(1, round(_ENOUGH / first))
            return lambda: float(read(rows.data_ptr(), size, threads, times))
        if self._device.type == "cpu":
            words = rows.view(-1).view(torch.float32)
            return lambda: seconds(words.sum, self._device)
        target = torch.empty_like(rows)  # a copy moves every byte twice
        return lambda: seconds(lambda: target.copy_(rows), self._device) / 2

    def peak(self) -> float:
        """Float32 operations per second, a multiply-add counting two."""
        if self._library is not None:
            return max(float(self._library.peak_rate(torch.get_num_threads())) for _ in range(9))
        size = 1024 if self._device.type == "cpu" else 8192
        left = torch.ones(size, size, device=self._device)
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            fastest = min(seconds(lambda: left @ left, self._device) for _ in range(9))
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed
        return 2 * size**3 / fastest


@cache
def _build() -> ctypes.CDLL | None:
    """The loops, on the OpenMP threads of torch; None without a compiler or GCC's OpenMP in torch."""
    try:
        loaded = Path("/proc/self/maps").read_text(encoding="utf-8").split()
        openmp = next(path for path in loaded if Path(path).name.startswith("libgomp"))
        with tempfile.TemporaryDirectory() as folder:
            compiler = shlex.split(os.environ.get("CXX", "c++"))
            unit, target = str(Path(folder, "limits.o")), str(Path(folder, "limits.so"))
            subprocess.run([*compiler, *_FLAGS, "-c", str(_SOURCE), "-o", unit], check=True, capture_output=True)
            subprocess.run([*compiler, "-shared", unit, openmp, "-o", target], check=True, capture_output=True)
            library = ctypes.CDLL(target)
    except (OSError, StopIteration, subprocess.CalledProcessError):
        return None
    library.read_once.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    library.peak_rate.argtypes = [ctypes.c_int]
    library.read_once.restype = library.peak_rate.restype = ctypes.c_double
    return library
