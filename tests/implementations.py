# SPDX-License-Identifier: Apache-2.0
"""Every implementation of the ops that is present: the reference, compiled kernels, CUDA kernels where there is a GPU.

A test that takes ``call`` from ``every`` gives an op tensors on the CPU and gets such tensors back, wherever it runs:
``call("layer_gram", rows, offsets)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fl_lightning.ops import _library, _reference

EXTENSION = _library.EXTENSION.module
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CHANGED = {"layer_combine_add": 0, "puc_track": 1}  # the argument that the op changes


class Implementation(NamedTuple):
    """Calls ops by name."""

    find: Callable[[str], Callable[..., Any]]
    device: str

    def moved(self, arguments: Sequence[Any]) -> list[Any]:
        """Arguments of an op with their tensors on the device, but for offsets and the like."""
        return [a.to(self.device) if torch.is_tensor(a) and a.dtype != torch.int64 else a for a in arguments]

    def __call__(self, op: str, *arguments: Any, **options: Any) -> Any:
        moved = self.moved(arguments)
        result = self.find(op)(*moved, **options)
        if op in CHANGED:
            arguments[CHANGED[op]].copy_(moved[CHANGED[op]])
        return tuple(r.cpu() for r in result) if isinstance(result, tuple) else None if result is None else result.cpu()


def dispatched(op: str) -> Callable[..., Any]:
    """What torch.library's dispatcher finds: compiled kernels before the reference."""
    return getattr(torch.ops.fl_lightning, op)


REFERENCE = Implementation(lambda op: _library._OPS[op].kernel, "cpu")
MISSING = pytest.mark.skipif(EXTENSION is None, reason=f"no compiled kernels: {_library.EXTENSION.reason}")
NO_GPU = pytest.mark.skipif(
    not _library.EXTENSION.cuda or not torch.cuda.is_available(),
    reason="no CUDA kernels, or no GPU that tests may see (FL_LIGHTNING_TEST_DEVICE=cuda)",
)
COMPILED = [
    pytest.param(Implementation(dispatched, "cpu"), id="compiled", marks=MISSING),
    pytest.param(Implementation(dispatched, "cuda"), id="cuda", marks=NO_GPU),
]
EVERY = [pytest.param(REFERENCE, id="reference"), *COMPILED]
every = pytest.mark.parametrize("call", EVERY)
compiled = pytest.mark.parametrize("call", COMPILED)


def results_of(call: Implementation, op: str, arguments: Any) -> list[Tensor]:
    """What an op returns, and its tensors as they are after the call."""
    own = [a.clone() if torch.is_tensor(a) else a for a in arguments]
    result = call(op, *own)
    returned = result if isinstance(result, tuple) else () if result is None else (result,)
    return [*returned, *filter(torch.is_tensor, own)]


def offsets_of(sizes: Any) -> Tensor:
    """Offsets of layers of these sizes."""
    return torch.tensor([0, *sizes]).cumsum(0)


def gaussian(m: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def beside_ties(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A combination that leads onto and next to the middle of every 16-bit number and the next one.

    Returns:
        Rows ``[3, n]``, coefficients ``[1, 3]``, and the sums in the dtype, rounded to nearest even once.
    """
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    base = every[every.isfinite()].double().repeat(5)
    digits, least = (10, -14) if dtype == torch.float16 else (7, -126)

    def unit(numbers: Tensor) -> Tensor:
        exponents = torch.frexp(numbers).exponent.long().sub(1).clamp(min=least).where(numbers != 0, least)
        return (exponents - digits + 1023 << 52).view(torch.float64)

    aside = torch.tensor([-32.0, -1.0, 0.0, 1.0, 32.0], dtype=torch.float64).repeat_interleave(len(base) // 5)
    rows, coeff = torch.stack([base, unit(base), aside * unit(base)]), torch.tensor([[1.0, 0.5, 2.0**-30]]).double()
    sums = (coeff[0, :, None] * rows).sum(0)  # exact
    return rows.to(dtype), coeff, ((sums / unit(sums)).round() * unit(sums)).to(dtype)


def exact_products(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """``[L, m, h]`` in float64."""
    left, right = left.double(), right.double()
    return torch.stack([left[:, a:b] @ right[:, a:b].T for a, b in pairwise(offsets.tolist())])


def random_bits(m: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A mask ``[m, n]``, and the same as words of keep bits."""
    keep = torch.rand(m, n, generator=torch.Generator().manual_seed(seed)) < 0.4
    padded = torch.zeros(m, -(-n // 32) * 32, dtype=torch.bool)
    padded[:, :n] = keep
    return keep, torch.stack([_reference._pack(row) for row in padded])


def samples(m: int = 3, n: int = 50) -> dict[str, tuple[Any, ...]]:
    """Valid arguments of every op."""
    rows, offsets = gaussian(m, n), offsets_of((n // 3, 0, n - n // 3))
    gram = exact_products(rows, rows, offsets)
    coeff = gaussian(3, m, torch.float64, seed=1)
    return {
        "layer_gram": (rows, offsets),
        "layer_squares": (rows, offsets),
        "layer_cross_gram": (rows, rows[:2].bfloat16(), offsets),
        "layer_chosen_gram": (rows, rows.bfloat16(), offsets, torch.tensor([2, 0])),
        "layer_dots": (rows, rows[0].clone(), offsets),
        "layer_combine": (rows.half(), offsets, coeff),
        "layer_cross_combine": (rows, rows[:2].clone(), offsets, gaussian(3, m + 2, torch.float64, seed=1)),
        "layer_combine_add": (torch.zeros(n), rows, offsets, coeff),
        "project_conflicts": (gram, torch.arange(m).flip(0), torch.arange(m) % 3 == 1),
        "min_norm": (gram,),
        "common_descent": (gram, max(1, m - 1), None, torch.linspace(-1, 1, max(1, m - 1)).double(), 1e-8, 1e-4, 1e-7),
        "puc_track": (rows[0].clone(), torch.zeros(n, dtype=torch.uint8), 1, 2, offsets),
        "puc_combine": (rows, random_bits(m, n)[1], torch.ones(m)),
        "trimmed_mean": (rows, (m - 1) // 2),
    }
