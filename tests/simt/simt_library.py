# SPDX-License-Identifier: Apache-2.0
"""Calls CUDA sources that simt_build.py built for the processor on tensors."""

from __future__ import annotations

import ctypes
import mmap
import os
from unittest import mock

import torch
from torch import Tensor

from fl_lightning.ops.slices import slice_columns

SCHEDULES = ("forward", "reverse", "random", "low_warp", "high_warp")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALIGNED, ODD = 64, 37  # margins of an output: it begins at a multiple of 16 bytes, and at none of two elements
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


def _matrix(x):
    assert x.dim() == 1 or x.stride(1) == 1 or x.shape[1] <= 1
    rows, stride = (x.shape[0], x.stride(0)) if x.dim() == 2 else (1, x.shape[0])
    return _Matrix(x.data_ptr(), rows, x.shape[-1], stride, _DTYPES.index(x.dtype))


def _pointer(x):
    return ctypes.c_void_p(x.data_ptr())


def of_kind(kind, rows):
    """Rows that look random as they are, or with one sign, constant, or spread over many sizes."""
    if kind == "absolute":
        return rows.abs()
    if kind == "constant":
        levels = torch.rand(len(rows), 1, generator=torch.Generator().manual_seed(2)).add(0.3)
        return levels.expand(rows.shape).contiguous()
    return rows.mul(2).exp() if kind == "lognormal" else rows


def before_a_wall(values):
    """The same matrix where memory ends: whatever reads beyond its last number ends the process (SIGSEGV)."""
    size = -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), dtype=torch.uint8)
    wall = ctypes.c_void_p(memory.data_ptr() + size)
    assert ctypes.CDLL(None).mprotect(wall, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return memory[size - values.nbytes : size].view(values.dtype).view(values.shape).copy_(values)


class Guarded:
    """An output tensor full of garbage, between margins that must not change."""

    def __init__(self, *shape, dtype=torch.float64, margin=ODD):
        size = torch.Size(shape).numel()
        self._margin, self._all = margin, torch.full((size + 2 * margin,), 85, dtype=dtype)
        self.tensor = self._all[margin : margin + size].view(shape)
        if dtype.is_floating_point:
            self.tensor.fill_(float("nan"))

    def done(self):
        edges = torch.cat([self._all[: self._margin], self._all[-self._margin :]])
        assert (edges == 85).all(), "written outside of the output"
        return self.tensor


class Kernels:
    """The functions of csrc/ops.h, namespace cuda, on CPU tensors."""

    def __init__(self, library, *, wgmma: str = "1"):
        self._library = ctypes.CDLL(str(library))
        self._margin = ODD
        with mock.patch.dict(os.environ, FL_LIGHTNING_WGMMA=wgmma):  # the first call reads it
            self.layer_gram(torch.zeros(33, 1), torch.tensor([0, 1]))

    def outputs(self, margin):
        """Where outputs begin: ``ALIGNED`` or ``ODD``."""
        self._margin = margin
        return self

    def _guarded(self, *shape, dtype=torch.float64):
        return Guarded(*shape, dtype=dtype, margin=self._margin)

    def schedule(self, name, seed=0):
        self._library.simt_configure(SCHEDULES.index(name), seed)
        return self

    def capability(self, major):
        """Stands in for a device of another compute capability."""
        self._library.simt_capable(major)
        return self

    def call(self, name, *arguments):
        function = getattr(self._library, name)
        function.restype = ctypes.c_char_p
        message = function(*arguments).decode()
        if message:
            raise KernelError(message)

    def fault(self, number: int, numbers: Tensor) -> Tensor:
        """Runs the kernel of faults.cpp with one fault, or with none (0)."""
        out = self._guarded(len(numbers))
        self.call("simt_fault", ctypes.c_int(number), _pointer(numbers), _pointer(out.tensor))
        return out.done()

    def _layers(self, offsets, total_columns=None):
        slice_of = slice_columns(int(offsets[-1]) if total_columns is None else total_columns)
        return _Layers(offsets.data_ptr(), len(offsets) - 1, slice_of)

    def layer_gram(self, rows: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
        out = self._guarded(len(offsets) - 1, len(rows), len(rows))
        self.call("layer_gram", _matrix(rows), self._layers(offsets, total), _pointer(out.tensor))
        return out.done()

    def layer_squares(self, rows: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
        out = self._guarded(len(offsets) - 1, len(rows))
        self.call("layer_squares", _matrix(rows), self._layers(offsets, total), _pointer(out.tensor))
        return out.done()

    def layer_cross_gram(self, rows: Tensor, others: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
        out = self._guarded(len(offsets) - 1, len(rows), len(others))
        self.call(
            "layer_cross_gram", _matrix(rows), _matrix(others), self._layers(offsets, total), _pointer(out.tensor)
        )
        return out.done()

    def layer_dots(self, rows: Tensor, step: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
        out = self._guarded(len(offsets) - 1, len(rows))
        self.call("layer_dots", _matrix(rows), _pointer(step), self._layers(offsets, total), _pointer(out.tensor))
        return out.done()

    def layer_combine(self, rows: Tensor, offsets: Tensor, coeff: Tensor, add: Tensor | None = None) -> Tensor:
        out = self._guarded(rows.shape[1], dtype=rows.dtype)
        if add is not None:
            out.tensor.copy_(add)
        coeff = coeff.double().contiguous()
        arguments = (_matrix(rows), self._layers(offsets), _pointer(coeff), _pointer(out.tensor))
        self.call("layer_combine", *arguments, ctypes.c_bool(add is not None))
        return out.done()

    def layer_combine_mixed(self, rows: Tensor, offsets: Tensor, coeff: Tensor, add: Tensor) -> Tensor:
        out = self._guarded(rows.shape[1], dtype=add.dtype)
        out.tensor.copy_(add)
        coeff, kind = coeff.double().contiguous(), ctypes.c_int(_DTYPES.index(add.dtype))
        arguments = (_matrix(rows), self._layers(offsets), _pointer(coeff), _pointer(out.tensor), kind)
        self.call("layer_combine_mixed", *arguments)
        return out.done()

    def copy_in(self, host: Tensor) -> Tensor:
        out = self._guarded(*host.shape, dtype=host.dtype)
        self.call("copy_in", _pointer(host), ctypes.c_int64(host.nbytes), _pointer(out.tensor))
        return out.done()

    def layer_cross_combine(self, rows: Tensor, others: Tensor, offsets: Tensor, coeff: Tensor) -> Tensor:
        out = self._guarded(rows.shape[1], dtype=rows.dtype)
        coeff = coeff.double().contiguous()
        arguments = (_matrix(rows), _matrix(others), self._layers(offsets), _pointer(coeff), _pointer(out.tensor))
        self.call("layer_cross_combine", *arguments)
        return out.done()

    def project_conflicts(self, gram: Tensor, order: Tensor, keep: Tensor) -> Tensor:
        out = self._guarded(*gram.shape)
        sizes = (ctypes.c_int64(gram.shape[0]), ctypes.c_int64(gram.shape[1]))
        self.call("project_conflicts", _pointer(gram), *sizes, _pointer(order), _pointer(keep), _pointer(out.tensor))
        return out.done()

    def min_norm(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        batch, k, _ = gram.shape
        lam, gap = self._guarded(batch, k), self._guarded(batch)
        sizes = (ctypes.c_int64(batch), ctypes.c_int64(k))
        self.call("min_norm", _pointer(gram), *sizes, _pointer(lam.tensor), _pointer(gap.tensor))
        return lam.done(), gap.done()

    def common_descent(
        self,
        gram: Tensor,
        online: int,
        scale: Tensor | None,
        weights: Tensor | None,
        *bounds: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, k, _ = gram.shape
        coeff = self._guarded(batch, k)
        solved, fair = (Guarded(batch, dtype=torch.uint8) for _ in range(2))
        sizes = tuple(ctypes.c_int64(size) for size in (batch, k, online))
        numbers = torch.tensor(bounds, dtype=torch.float64)
        given = tuple(None if x is None else _pointer(x) for x in (scale, weights))
        outputs = tuple(_pointer(out.tensor) for out in (coeff, solved, fair))
        self.call("common_descent", _pointer(gram), *given, *sizes, _pointer(numbers), *outputs)
        assert (torch.stack([solved.tensor, fair.tensor]) <= 1).all(), "a flag was not written"
        return coeff.done(), solved.done().bool(), fair.done().bool()

    def puc_track(
        self,
        row: Tensor,
        counts: Tensor,
        threshold: int,
        participations: int,
        offsets: Tensor,
        total: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        keep, norms = self._guarded((len(row) + 31) // 32, dtype=torch.int32), self._guarded(len(offsets) - 1)
        own = self._guarded(len(counts), dtype=counts.dtype)
        own.tensor.copy_(counts)
        numbers = (ctypes.c_int64(threshold), ctypes.c_int64(participations))
        outputs = (_pointer(keep.tensor), _pointer(norms.tensor))
        kind = ctypes.c_int(_COUNTS.index(counts.dtype))
        self.call(
            "puc_track", _matrix(row), _pointer(own.tensor), kind, *numbers, self._layers(offsets, total), *outputs
        )
        counts.copy_(own.done())
        return keep.done(), norms.done()

    def puc_combine(self, rows: Tensor, keep: Tensor, weights: Tensor) -> Tensor:
        out = self._guarded(rows.shape[1], dtype=rows.dtype)
        weights = weights.double()
        self.call("puc_combine", _matrix(rows), _pointer(keep), _pointer(weights), _pointer(out.tensor))
        return out.done()

    def trimmed_mean(self, rows: Tensor, trim: int) -> Tensor:
        out = Guarded(rows.shape[1], dtype=rows.dtype)
        self.call("trimmed_mean", _matrix(rows), ctypes.c_int64(trim), _pointer(out.tensor))
        return out.done()
