# SPDX-License-Identifier: Apache-2.0
"""Every implementation of the ops on rows against sums in float64: shapes, dtypes, memory layouts, accuracy, threads.

The reference is always tested, compiled kernels where they are built, CUDA kernels where there is a GPU. Schemas,
``opcheck`` and ``torch.compile`` are tested in test_op_library.py, with whatever implementation runs.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fl_lightning import ops
from fl_lightning.ops import _library, _reference

EXTENSION = _library.EXTENSION.module
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
SIZES = (129, 0, 1, 3, 20_000, 5)
STEP_ERROR = {torch.float64: 1e-13, torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


class Implementation(NamedTuple):
    find: Callable[[str], Callable]
    device: str

    def __call__(self, op, *arguments):
        """Calls an op with tensors on the CPU and returns tensors on the CPU; offsets stay there."""
        moved = [a.to(self.device) if torch.is_tensor(a) and not is_offsets(a) else a for a in arguments]
        result = self.find(op)(*moved)
        if op in ("layer_combine_add", "puc_track"):
            changed = op == "puc_track"
            arguments[changed].copy_(moved[changed])
        return tuple(r.cpu() for r in result) if isinstance(result, tuple) else None if result is None else result.cpu()


def is_offsets(tensor):
    return tensor.dtype == torch.int64


def compiled(device):
    return Implementation(lambda op: getattr(torch.ops.fl_lightning, op), device)


MISSING = pytest.mark.skipif(EXTENSION is None, reason=f"no compiled kernels: {_library.EXTENSION.reason}")
NO_GPU = pytest.mark.skipif(
    EXTENSION is None or not EXTENSION.has_cuda() or not torch.cuda.is_available(), reason="no CUDA kernels, or no GPU"
)
COMPILED = [
    pytest.param(compiled("cpu"), id="compiled", marks=MISSING),
    pytest.param(compiled("cuda"), id="cuda", marks=NO_GPU),
]
EVERY = [pytest.param(Implementation(lambda op: getattr(_reference, op), "cpu"), id="reference"), *COMPILED]
every = pytest.mark.parametrize("call", EVERY)


def offsets_of(sizes):
    return torch.tensor([0, *sizes]).cumsum(0)


def gaussian(m, n, dtype=torch.float32, seed=0):
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_products(left, right, offsets):
    left, right = left.double(), right.double()
    return torch.stack([left[:, a:b] @ right[:, a:b].T for a, b in pairwise(offsets.tolist())])


def norms(rows, offsets):
    return torch.stack([rows[:, a:b].double().norm(dim=1) for a, b in pairwise(offsets.tolist())])


def check_products(call, rows, others, offsets, bound=1e-7):
    """Gram, cross-Gram and dots, to a bound relative to the product of the norms."""
    size, other_size = norms(rows, offsets), norms(others, offsets)
    gram = call("layer_gram", rows, offsets)
    assert torch.equal(gram, gram.transpose(1, 2))
    limit = bound * size[:, :, None] * size[:, None, :]
    assert ((gram - exact_products(rows, rows, offsets)).abs() <= limit).all()
    exact = exact_products(rows, others, offsets)
    limit = bound * size[:, :, None] * other_size[:, None, :]
    assert ((call("layer_cross_gram", rows, others, offsets) - exact).abs() <= limit).all()
    for j in {0, len(others) - 1}:
        assert ((call("layer_dots", rows, others[j], offsets) - exact[:, :, j]).abs() <= limit[:, :, j]).all()


def check_combination(call, rows, offsets, out_dtype):
    coeff = gaussian(len(offsets) - 1, len(rows), torch.float64, seed=9)
    each = coeff.repeat_interleave(offsets.diff(), 0).T
    want, size = (each * rows.double()).sum(0), (each * rows.double()).abs().sum(0)
    tiny = 2**-24 if torch.float16 in (rows.dtype, out_dtype) else 0
    step = call("layer_combine", rows, offsets, coeff)
    assert step.dtype == rows.dtype
    assert ((step.double() - want).abs() <= STEP_ERROR[rows.dtype] * want.abs() + 1e-13 * size + tiny).all()
    start = gaussian(1, rows.shape[1], out_dtype, seed=3)[0]
    out = start.clone()
    call("layer_combine_add", out, rows, offsets, coeff)
    want = want + start.double()
    assert ((out.double() - want).abs() <= STEP_ERROR[out_dtype] * want.abs() + 1e-13 * (size + 1) + tiny).all()


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 2, 3, 10, 33, 64])
def test_products_and_combinations(call, m, dtype):
    offsets = offsets_of(SIZES)
    n = int(offsets[-1])
    rows = gaussian(m, n, dtype)
    other = DTYPES[(DTYPES.index(dtype) + m) % 4]  # the same dtype and mixed ones
    check_products(call, rows, gaussian(1 + m % 7, n, other, seed=1), offsets)
    check_combination(call, rows, offsets, other)


@every
@pytest.mark.parametrize("m", [1, 10, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_of_a_million(call, m, dtype):
    offsets = offsets_of((7, 1_000_000, 129))
    rows = gaussian(m, int(offsets[-1]), dtype)
    check_products(call, rows, rows[: 1 + m // 4], offsets)
    check_combination(call, rows, offsets, dtype)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["constant", "lognormal", "absolute"])
def test_error_on_rows_of_one_sign(call, kind, dtype):
    """Rounding errors add up where terms are alike: the bound is five times that on random rows."""
    for n in (129, 5_000, 300_000):
        rows = gaussian(10, n)
        if kind == "constant":
            rows = torch.linspace(0.1, 1.7, 10)[:, None].expand(10, n)
        elif kind == "lognormal":
            rows = rows.exp()
        else:
            rows = rows.abs()
        rows = rows.to(dtype).contiguous()
        check_products(call, rows, rows[[0, 7, 4]], offsets_of((n,)), bound=5e-7)


@every
@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e19, 1e30])
def test_products_beyond_the_range_of_float32(call, scale):
    """Products of such rows overflow or vanish in float32; sums fall back to float64."""
    rows = gaussian(4, 5_003) * scale
    rows[1] = 0
    rows[2] /= scale
    rows[3, ::2] = 0
    others = rows.flip(0).clone()
    others[0, 1::2] = 0  # has nothing in common with its mirror image, row 3
    check_products(call, rows, others, offsets_of((5_000, 3)))


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_where_float64_sums_show_it(call, bad):
    rows = gaussian(3, 9_000)
    rows[1, 3_000] = bad
    rows[2, 8_999] = -bad
    offsets = offsets_of((100, 4_000, 4_900))
    torch.testing.assert_close(
        call("layer_gram", rows, offsets), exact_products(rows, rows, offsets), equal_nan=True, rtol=1e-5, atol=1e-3
    )
    coeff = torch.ones(3, 3, dtype=torch.float64)
    coeff[:, 1] = 0
    assert call("layer_combine", rows, offsets, coeff).isfinite().logical_not().nonzero().tolist() == [[3_000], [8_999]]


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_anywhere_in_memory(call, dtype):
    """Slices of larger matrices, at every alignment, give the bits of a matrix of their own."""
    n, offsets = 4_000, offsets_of((33, 3_967))
    whole = gaussian(6, n + 40, dtype)
    coeff = gaussian(2, 4, torch.float64)
    for start in (0, 1, 2, 3, 5, 8, 15, 31):
        view = whole[1:5, start : start + n]
        own = view.contiguous()
        assert torch.equal(call("layer_gram", view, offsets), call("layer_gram", own, offsets))
        assert torch.equal(call("layer_dots", view, view[2], offsets), call("layer_dots", own, own[2], offsets))
        assert torch.equal(call("layer_combine", view, offsets, coeff), call("layer_combine", own, offsets, coeff))
    for view in (own.T.contiguous().T, own[:1].expand(4, n), own.flip(0)[::2]):
        check_products(call, view, view[:2], offsets)
        check_combination(call, view, offsets, dtype)


@every
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_16_bit_number(call, dtype):
    """All bit patterns survive, and products round as torch rounds them."""
    row = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)[None]
    offsets = offsets_of((row.shape[1],))
    for factor in (1.0, 0.3, 1.0009765625, 3.0e-5, 70_000.0):
        coeff = torch.tensor([[factor]], dtype=torch.float64)
        want = (row[0].double() * factor).to(dtype)
        torch.testing.assert_close(call("layer_combine", row, offsets, coeff), want, rtol=0, atol=0, equal_nan=True)


def random_bits(m, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(m, n, generator=generator) < 0.4
    padded = torch.zeros(m, -(-n // 32) * 32, dtype=torch.bool)
    padded[:, :n] = keep
    return keep, torch.stack([_reference._pack(row) for row in padded])


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 31), (10, 20_129), (33, 1_000), (64, 9_003)])
def test_weighted_means_of_kept_coordinates(call, m, n, dtype):
    keep, words = random_bits(m, n)
    rows, weights = gaussian(m, n, dtype), torch.rand(m, generator=torch.Generator().manual_seed(2)) + 0.1
    weight = weights.double()[:, None] * keep
    mass = weight.sum(0)
    want = torch.where(mass > 0, (weight * rows.double()).sum(0) / mass.clamp(min=1e-9), 0.0)
    size = torch.where(mass > 0, (weight * rows.double()).abs().sum(0) / mass.clamp(min=1e-9), 0.0)
    rows[~keep] = float("nan")
    wider = torch.cat([rows, rows], 1)[:, :n]
    tiny = 2**-24 if dtype == torch.float16 else 0
    for given in (rows, wider):
        step = call("puc_combine", given, words, weights)
        assert ((step.double() - want).abs() <= STEP_ERROR[dtype] * want.abs() + 1e-13 * size + tiny).all()
        assert (step[mass == 0] == 0).all()


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count_type", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_tracking_equals_integer_arithmetic(call, dtype, count_type):
    offsets = offsets_of((129, 0, 1, 3, 140_000, 70))
    n = int(offsets[-1])
    row = torch.randint(-2, 3, (n,), generator=torch.Generator().manual_seed(1)).to(dtype)
    row[::1000] = float("nan")
    for participations, threshold in ((0, 0), (0, 1), (5, 2), (100, 50), (100, 101), (200, 10**12)):
        counts = torch.randint(0, participations + 1, (n,)).to(count_type)
        past, up = counts.long(), row <= 0
        keep = torch.where(up, past, participations - past) >= threshold
        words, squares = call("puc_track", row, counts, threshold, participations, offsets)
        assert torch.equal(counts.long(), past + up)
        assert torch.equal(_reference._unpack(words).bool()[:n], keep)
        assert not _reference._unpack(words).bool()[n:].any()
        kept = torch.where(keep, row.double(), 0.0).square()
        want = torch.stack([kept[a:b].sum() for a, b in pairwise(offsets.tolist())])
        torch.testing.assert_close(squares, want, rtol=1e-12, atol=0, equal_nan=True)


@every
@pytest.mark.parametrize("tau", [0.3, 0.7])
def test_sixty_rounds_of_fedheal(call, tau):
    """Integer histories of three clients, one of which joins late, against plain Python integers."""
    n, offsets = 40, offsets_of((33, 7))
    generator = torch.Generator().manual_seed(int(10 * tau))
    counts = [torch.zeros(n, dtype=torch.uint8) for _ in range(3)]
    past, taken = [[0] * n for _ in range(3)], [0, 0, 0]
    empty = 0
    for number in range(60):
        online = [c for c in range(3) if c < 2 or number >= 20]
        rows = torch.randn(len(online), n, generator=generator) + 0.3
        weights = torch.rand(len(online), generator=generator) + 0.1
        words, kept = [], []
        for row, c in zip(rows, online, strict=True):
            threshold = 0 if taken[c] == 0 else int(tau * taken[c]) + 1
            words.append(call("puc_track", row, counts[c], threshold, taken[c], offsets)[0])
            up = [x <= 0 for x in row.tolist()]
            kept.append([(p if u else taken[c] - p) >= threshold for u, p in zip(up, past[c], strict=True)])
            past[c] = [p + u for u, p in zip(up, past[c], strict=True)]
            taken[c] += 1
            assert _reference._unpack(words[-1]).bool()[:n].tolist() == kept[-1]
            assert counts[c].tolist() == past[c]
        mask = torch.tensor(kept)
        weight = weights[:, None] * mask
        share = torch.where(mask.any(0), weight / weight.sum(0), 0.0)
        step = call("puc_combine", rows, torch.stack(words), weights)
        torch.testing.assert_close(step, (share * rows).sum(0), rtol=1e-6, atol=1e-6)
        empty += int((~mask.any(0)).sum())
    assert empty > 0


@pytest.mark.parametrize("call", COMPILED)
@pytest.mark.parametrize("m", [1, 2, 10, 41])
def test_same_bits_again_and_with_two_threads(call, m):
    n = 300_007 if m <= 10 else 60_007
    offsets = offsets_of((20_000, 1, n - 20_001))
    rows, others, coeff = gaussian(m, n), gaussian(7, n, torch.bfloat16, seed=1), gaussian(3, m, torch.float64)
    _, words = random_bits(m, n)

    def results():
        counts = torch.zeros(n, dtype=torch.uint8)
        return (
            call("layer_gram", rows, offsets),
            call("layer_gram", rows.half(), offsets),
            call("layer_cross_gram", rows, others, offsets),
            call("layer_dots", rows, rows[0], offsets),
            call("layer_combine", rows, offsets, coeff),
            call("puc_combine", rows, words, torch.ones(m)),
            *call("puc_track", rows[0], counts, 0, 0, offsets),
            counts,
        )

    first = results()
    assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))


def free_memory():
    """Bytes that can be allocated now."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return 0
    return 1024 * int(next(line.split()[1] for line in info.read_text().splitlines() if "MemAvailable" in line))


@pytest.mark.slow
@pytest.mark.parametrize("call", COMPILED)
def test_more_elements_than_32_bits_count(call):
    if free_memory() < 14 << 30:
        pytest.skip("needs 14 GiB of free memory")
    n = 1_100_000_000
    rows = torch.ones(2, n, dtype=torch.bfloat16)
    rows[1, -1] = 2
    offsets = offsets_of((5, n - 5))
    assert rows.numel() > 2**31
    gram = call("layer_gram", rows, offsets)
    assert gram.tolist() == [[[5, 5], [5, 5]], [[n - 5, n - 4], [n - 4, n - 2]]]
    assert call("layer_dots", rows, rows[1], offsets).tolist() == [[5, 5], [n - 4, n - 2]]
    step = call("layer_combine", rows, offsets, torch.tensor([[1.0, 1.0], [2.0, 3.0]], dtype=torch.float64))
    assert step[:5].eq(2).all()
    assert step[5:-1].eq(5).all()
    assert step[-1] == 8
    words = torch.full((2, -(-n // 32)), -1, dtype=torch.int32)
    words[0, -1] = 0  # the last 32 coordinates are kept by the second client alone
    step = call("puc_combine", rows, words, torch.tensor([1.0, 3.0]))
    assert step[:-1].eq(1).all()
    assert step[-1] == 2
    del rows, step, words
    row = torch.ones(2**31 + 40, dtype=torch.bfloat16)
    row[-1] = -1
    counts = torch.zeros(len(row), dtype=torch.uint8)
    words, squares = call("puc_track", row, counts, 0, 0, offsets_of((len(row) - 2, 2)))
    assert squares.tolist() == [len(row) - 2, 2]
    assert counts[:-1].eq(0).all()
    assert counts[-1] == 1
    assert words[:-1].eq(-1).all()
    assert int(words[-1]) == 2 ** (len(row) % 32) - 1


@MISSING
@pytest.mark.skipif("FL_LIGHTNING_ISA" in os.environ, reason="this run is for one instruction set")
@pytest.mark.parametrize("instructions", ["avx2", "base"])
def test_lesser_instruction_sets_pass_too(instructions):
    code = (
        "import sys, pytest\n"
        "from fl_lightning.ops import _library\n"
        "print('runs', _library.EXTENSION.module.instruction_set())\n"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-m', 'not slow', '-k', 'compiled', {__file__!r}]))"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "FL_LIGHTNING_ISA": instructions}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert (
        f"runs {'avx2' if instructions == 'avx2' else ''}" in result.stdout or EXTENSION.instruction_set() != "avx512"
    )


def test_what_runs_is_reported():
    reported = {backend.implementation for backend in ops.backend().values()}
    expected = "torch" if EXTENSION is None else "cuda" if EXTENSION.has_cuda() and torch.cuda.is_available() else "cpu"
    assert reported == {expected}
