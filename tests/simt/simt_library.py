# SPDX-License-Identifier: Apache-2.0
"""Calls CUDA sources that simt_build.py built for the processor on tensors."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fl_lightning.ops.slices import slice_columns

SCHEDULES = ("forward", "reverse", "random", "low_warp", "high_warp")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALIGNED, ODD = 0, 37  # where an output begins: at a multiple of 16 bytes, and at none of two elements
_INPUT, _OUTPUT, _BOTH = range(3)
_COUNTS = (torch.uint8, torch.int16, torch.int32)


class KernelError(Exception):
    """What the harness found."""


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("dtype", ctypes.c_int),
    ]


class _Layers(ctypes.Structure):
    _fields_ = [("offsets", ctypes.c_void_p), ("count", ctypes.c_int64), ("slice", ctypes.c_int64)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of_kind(kind, rows):
    """Rows that look random as they are, or with one sign, constant, or spread over many sizes."""
    if kind == "absolute":
        return rows.abs()
    if kind == "constant":
        levels = torch.rand(len(rows), 1, generator=torch.Generator().manual_seed(2)).add(0.3)
        return levels.expand(rows.shape).contiguous()
    return rows.mul(2).exp() if kind == "lognormal" else rows


class Kernels:
    """The functions of csrc/ops.h, namespace cuda, on CPU tensors."""

    def __init__(self, library):
        self._library = ctypes.CDLL(str(library))
        self._begin = ODD

    def outputs(self, begin):
        """Where outputs begin: ``ALIGNED`` or ``ODD``."""
        self._begin = begin
        return self

    def _memory(self, x, access):
        """Tells the harness of a tensor on the device, for one call."""
        each = x.element_size()
        rows, width, stride = (*x.shape, x.stride(0)) if x.dim() == 2 else (1, x.numel(), x.numel())
        rows = rows if stride else min(rows, 1)  # repeated ones are in one place
        sizes = (ctypes.c_int64(size) for size in (rows, width * each, max(stride, width) * each))
        self._library.simt_memory(ctypes.c_void_p(x.data_ptr()), *sizes, each, access)

    def _matrix(self, x):
        assert x.dim() == 1 or x.stride(1) == 1 or x.shape[1] <= 1
        self._memory(x, _INPUT)
        rows, stride = (x.shape[0], x.stride(0)) if x.dim() == 2 else (1, x.shape[0])
        return _Matrix(x.data_ptr(), rows, x.shape[-1], stride, _DTYPES.index(x.dtype))

    def _pointer(self, x, access=_INPUT):
        assert x.is_contiguous()
        self._memory(x.view(-1), access)
        return ctypes.c_void_p(x.data_ptr())

    def _output(self, x):
        return self._pointer(x, _OUTPUT)

    def _garbage(self, *shape, dtype=torch.float64):
        """An output that nobody has written."""
        size = torch.Size(shape).numel()
        out = torch.full((self._begin + size,), 85, dtype=dtype)[self._begin :].view(shape)
        return out.fill_(float("nan")) if dtype.is_floating_point else out

    def schedule(self, name, seed=0):
        self._library.simt_configure(SCHEDULES.index(name), seed)
        return self

    def capability(self, major):
        """Stands in for a device of another compute capability."""
        self._library.simt_capable(major)
        return self

    def driver(self, version):
        """Stands in for a driver of another release of CUDA, such as 12010 for 12.1."""
        self._library.simt_drive(version)
        return self

    def launches(self) -> int:
        """How many kernels were launched since the last question."""
        return self._library.simt_launched()

    def shared_bytes(self) -> int:
        """What the last launch had of shared memory beside what its kernel declares."""
        return self._library.simt_shared_bytes()

    def call(self, name, *arguments):
        function = getattr(self._library, name)
        function.restype = ctypes.c_char_p
        message = function(*arguments).decode()
        self._library.simt_forget()
        if message:
            raise KernelError(message)

    def fault(self, number: int, numbers: Tensor) -> Tensor:
        """Runs the kernel of faults.cu with one fault, or with none (0)."""
        out = self._garbage(len(numbers))
        self.call("simt_fault", ctypes.c_int(number), self._pointer(numbers), self._output(out))
        return out

    def _layers(self, offsets, total_columns=None):
        slice_of = slice_columns(int(offsets[-1]) if total_columns is None else total_columns)
        return _Layers(offsets.data_ptr(), len(offsets) - 1, slice_of)

    def _sums(self, name, shape, offsets, total, *inputs):
        """Numbers of each layer."""
        out = self._garbage(len(offsets) - 1, *shape)
        self.call(name, *inputs, self._layers(offsets, total), self._output(out))
        return out

    def layer_gram(self, rows: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
        return self._sums("layer_gram", (len(rows), len(rows)), offsets, total, self._matrix(rows))

    def layer_squares(self, rows: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
        return self._sums("layer_squares", (len(rows),), offsets, total, self._matrix(rows))

    def layer_cross_gram(self, rows: Tensor, others: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
        inputs = self._matrix(rows), self._matrix(others)
        return self._sums("layer_cross_gram", (len(rows), len(others)), offsets, total, *inputs)

    def layer_dots(self, rows: Tensor, step: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
        return self._sums("layer_dots", (len(rows),), offsets, total, self._matrix(rows), self._pointer(step))

    def layer_combine(self, rows: Tensor, offsets: Tensor, coeff: Tensor, add: Tensor | None = None) -> Tensor:
        out = self._garbage(rows.shape[1], dtype=rows.dtype)
        if add is not None:
            out.copy_(add)
        coeff = coeff.double().contiguous()
        to = self._pointer(out, _OUTPUT if add is None else _BOTH)
        arguments = (self._matrix(rows), self._layers(offsets), self._pointer(coeff), to)
        self.call("layer_combine", *arguments, ctypes.c_bool(add is not None))
        return out

    def layer_combine_mixed(self, rows: Tensor, offsets: Tensor, coeff: Tensor, add: Tensor) -> Tensor:
        out = self._garbage(rows.shape[1], dtype=add.dtype)
        out.copy_(add)
        coeff, kind = coeff.double().contiguous(), ctypes.c_int(_DTYPES.index(add.dtype))
        arguments = (self._matrix(rows), self._layers(offsets), self._pointer(coeff), self._pointer(out, _BOTH), kind)
        self.call("layer_combine_mixed", *arguments)
        return out

    def copy_in(self, host: Tensor) -> Tensor:
        out = self._garbage(*host.shape, dtype=host.dtype)
        self.call("copy_in", ctypes.c_void_p(host.data_ptr()), ctypes.c_int64(host.nbytes), self._output(out))
        return out

    def layer_cross_combine(self, rows: Tensor, others: Tensor, offsets: Tensor, coeff: Tensor) -> Tensor:
        out, coeff = self._garbage(rows.shape[1], dtype=rows.dtype), coeff.double().contiguous()
        inputs = self._matrix(rows), self._matrix(others), self._layers(offsets), self._pointer(coeff)
        self.call("layer_cross_combine", *inputs, self._output(out))
        return out

    def project_conflicts(self, gram: Tensor, order: Tensor, keep: Tensor) -> Tensor:
        out, sizes = self._garbage(*gram.shape), map(ctypes.c_int64, gram.shape[:2])
        inputs = self._pointer(gram), *sizes, self._pointer(order), self._pointer(keep)
        self.call("project_conflicts", *inputs, self._output(out))
        return out

    def min_norm(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        lam, gap = self._garbage(*gram.shape[:2]), self._garbage(len(gram))
        sizes = map(ctypes.c_int64, gram.shape[:2])
        self.call("min_norm", self._pointer(gram), *sizes, self._output(lam), self._output(gap))
        return lam, gap

    def common_descent(
        self, gram: Tensor, online: int, scale: Tensor | None, weights: Tensor | None, *bounds: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, k, _ = gram.shape
        coeff = self._garbage(batch, k)
        solved, fair = (self._garbage(batch, dtype=torch.uint8) for _ in range(2))
        sizes, numbers = map(ctypes.c_int64, (batch, k, online)), torch.tensor(bounds, dtype=torch.float64)
        given = tuple(None if x is None else self._pointer(x) for x in (scale, weights))
        outputs = map(self._output, (coeff, solved, fair))
        self.call("common_descent", self._pointer(gram), *given, *sizes, ctypes.c_void_p(numbers.data_ptr()), *outputs)
        assert (torch.stack([solved, fair]) <= 1).all(), "a flag was not written"
        return coeff, solved.bool(), fair.bool()

    def puc_track(
        self,
        row: Tensor,
        counts: Tensor,
        threshold: int,
        participations: int,
        offsets: Tensor,
        total: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        keep, norms = self._garbage((len(row) + 31) // 32, dtype=torch.int32), self._garbage(len(offsets) - 1)
        own = self._garbage(len(counts), dtype=counts.dtype).copy_(counts)
        kind, numbers = ctypes.c_int(_COUNTS.index(counts.dtype)), map(ctypes.c_int64, (threshold, participations))
        inputs = self._matrix(row), self._pointer(own, _BOTH), kind, *numbers, self._layers(offsets, total)
        self.call("puc_track", *inputs, self._output(keep), self._output(norms))
        counts.copy_(own)
        return keep, norms

    def puc_combine(self, rows: Tensor, keep: Tensor, weights: Tensor) -> Tensor:
        out = self._garbage(rows.shape[1], dtype=rows.dtype)
        weights = weights.double()
        self.call("puc_combine", self._matrix(rows), self._pointer(keep), self._pointer(weights), self._output(out))
        return out

    def trimmed_mean(self, rows: Tensor, trim: int) -> Tensor:
        out = self._garbage(rows.shape[1], dtype=rows.dtype)
        self.call("trimmed_mean", self._matrix(rows), ctypes.c_int64(trim), self._output(out))
        return out
