# SPDX-License-Identifier: Apache-2.0
"""Every implementation of the ops on rows against sums in float64: shapes, dtypes, memory layouts, accuracy.

FedHEAL's ops are in test_puc_kernels.py, those on Gram matrices in test_gram_kernels.py, threads, sizes beyond 32 bits
and instruction sets in test_kernel_runs.py.
"""

from itertools import pairwise

import pytest
import torch
from implementations import DTYPES, beside_ties, compiled, every, exact_products, gaussian, offsets_of

HALVES = (torch.float16, torch.bfloat16)
SIZES = (129, 0, 1, 3, 20_000, 5)
STEP_ERROR = {torch.float64: 1e-13, torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def norms(rows, offsets):
    return torch.stack([rows[:, a:b].double().norm(dim=1) for a, b in pairwise(offsets.tolist())])


def check_products(call, rows, others, offsets, bound=None):
    """Gram, cross-Gram and dots, to a bound relative to the product of the norms: tensor cores have a wider one."""
    if bound is None:
        bound = 3e-7 if call.device == "cuda" and rows.dtype in HALVES else 1e-7
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
@pytest.mark.parametrize("m", [1, 2, 3, 10, 33, 64, 100])
def test_products_and_combinations(call, m, dtype):
    offsets = offsets_of(SIZES)
    n = int(offsets[-1])
    rows = gaussian(m, n, dtype)
    other = DTYPES[(DTYPES.index(dtype) + m) % 4]  # the same dtype and mixed ones
    bound = 3e-7 if call.device == "cuda" else 1e-7  # tensor cores
    check_products(call, rows, gaussian(1 + m % 7, n, other, seed=1), offsets, bound)
    check_combination(call, rows, offsets, other)


@every
@pytest.mark.parametrize(("m", "h"), [(10, 59), (40, 10), (4, 21), (21, 20), (40, 24)])
def test_products_of_few_rows_with_many(call, m, h):
    """Long enough for several panels, one with a remainder; columns that are not aligned."""
    offsets = offsets_of((2_500, 0, 4_000))
    rows, others = gaussian(m, 6_501)[:, 1:], gaussian(h, 6_500, seed=1)
    bound = 3e-7 if call.device == "cuda" else 1e-7  # tensor cores
    check_products(call, rows, others, offsets, bound)
    check_products(call, rows, others.bfloat16(), offsets, bound)


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "h"), [(1, 0), (3, 2), (10, 7)])
def test_combinations_of_two_matrices(call, m, h, dtype):
    offsets = offsets_of(SIZES)
    n = int(offsets[-1])
    rows, others = gaussian(m, n, dtype), gaussian(h, n, dtype, seed=1)
    coeff = gaussian(len(offsets) - 1, m + h, torch.float64, seed=9)
    both = torch.cat([rows, others])
    assert torch.equal(
        call("layer_cross_combine", rows, others, offsets, coeff), call("layer_combine", both, offsets, coeff)
    )
    coeff[:, 0] = 0  # what has no part does not count, even where it is no number
    coeff[-1] = 0
    step = call("layer_cross_combine", rows, others, offsets, coeff)
    rows[0] = torch.nan
    assert torch.equal(call("layer_cross_combine", rows, others, offsets, coeff), step)
    assert not step[int(offsets[-2]) :].any()
    rows[0] = 0
    torch.testing.assert_close(step, call("layer_combine", torch.cat([rows, others]), offsets, coeff), rtol=0, atol=0)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_number_of_rows(call, dtype):
    """Whole numbers, for which float32 sums are exact too: a single wrong or missing product shows."""
    offsets = offsets_of((0, 129, 1, 3))
    for m in range(1, 65):
        rows = torch.randint(-3, 4, (m, 133), generator=torch.Generator().manual_seed(m)).to(dtype)
        others = rows.flip(1)[: 1 + 7 * m % 11]
        # On a GPU tensor cores lose 2^-22 of a product.
        nearly = torch.round if call.device == "cuda" and dtype == torch.float32 else torch.Tensor.clone
        assert torch.equal(nearly(call("layer_gram", rows, offsets)), exact_products(rows, rows, offsets))
        exact = exact_products(rows, others, offsets)
        assert torch.equal(nearly(call("layer_cross_gram", rows, others, offsets)), exact)
        assert torch.equal(call("layer_dots", rows, others[0].clone(), offsets), exact[:, :, 0])
        coeff = torch.randint(-1, 2, (4, m), generator=torch.Generator().manual_seed(m)).double()
        want = (coeff.repeat_interleave(offsets.diff(), 0).T * rows.double()).sum(0)
        assert torch.equal(call("layer_combine", rows, offsets, coeff), want.to(dtype))


@every
@pytest.mark.parametrize(
    ("m", "dtype"),
    [
        (1, torch.float32),
        (2, torch.float64),
        (3, torch.float16),
        (10, torch.bfloat16),
        pytest.param(10, torch.float32, marks=pytest.mark.slow),
        pytest.param(64, torch.float32, marks=pytest.mark.slow),
        pytest.param(64, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
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
        check_products(call, rows, rows[[0, 7, 4]], offsets_of((n,)), bound=8e-7 if call.device == "cuda" else 5e-7)


@every
@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e19, 1e30])
def test_products_beyond_the_range_of_float32(call, scale):
    """Products of such rows overflow or vanish in float32; sums fall back to float64."""
    if call.device == "cuda" and scale < 1e-19:
        pytest.skip("on CUDA they vanish, as the docstring of layer_gram says")
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
@pytest.mark.parametrize("width", [2**16, 29])
def test_every_16_bit_number(call, width, dtype):
    """All bit patterns survive, and products round as torch rounds them, in long layers and in short ones."""
    row = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)[None]
    offsets = torch.tensor([*range(0, 2**16, width), 2**16])
    for factor in (1.0, 0.3, 1.25, 1.0009765625, 3.0e-5, 70_000.0):
        coeff = torch.full((len(offsets) - 1, 1), factor, dtype=torch.float64)
        want = (row[0].double() * factor).to(dtype)
        torch.testing.assert_close(call("layer_combine", row, offsets, coeff), want, rtol=0, atol=0, equal_nan=True)


@every
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_numbers_are_rounded_once(call, dtype):
    """300,000 sums of which the first rounding, to float32, would make half-way cases of 16 bits."""
    rows, coeff, want = beside_ties(dtype)
    offsets = offsets_of((rows.shape[1],))
    assert torch.equal(call("layer_combine", rows, offsets, coeff), want)
    out = torch.zeros_like(want)
    call("layer_combine_add", out, rows.double(), offsets, coeff)
    assert torch.equal(out, want)
    number, nearest = (141.18749386698403, 141.125) if dtype == torch.float16 else (1 + 2**-8 + 2**-40, 1 + 2**-7)
    few, coeff = torch.ones(1, 37, dtype=dtype), torch.tensor([[number]], dtype=torch.float64)
    assert call("layer_combine", few, offsets_of((37,)), coeff).unique().tolist() == [nearest]


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2**63 - 1, -1, 0x7FF0000000000001])
def test_a_nan_of_any_bits_stays_one(call, bits, dtype):
    coeff = torch.full((1, 1), bits, dtype=torch.int64).view(torch.float64)
    assert call("layer_combine", torch.ones(1, 300, dtype=dtype), offsets_of((300,)), coeff).isnan().all()


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 2, 0, 3), (1, 3, 2, 0)], ids=str)
def test_small_rows_anywhere_among_others(call, order, dtype):
    """Products of small rows vanish in float32, whichever rows come before them: none, zeros, or ordinary ones."""
    if call.device == "cuda":
        pytest.skip("on CUDA they vanish, as the docstring of layer_gram says")
    rows = gaussian(4, 5_003)
    rows[0], rows[2] = 0, rows[2] * 1e-22
    rows = rows[list(order)].to(dtype)
    check_products(call, rows, rows.flip(0), offsets_of((5_003,)))


@compiled
def test_very_many_rows(call):
    rows = gaussian(1100, 2050)
    check_products(call, rows, rows[:2], offsets_of((2050,)), bound=5e-7)


@compiled
def test_very_many_layers(call):
    """Their offsets take several launches, and no sum is in float32."""
    rows, offsets = gaussian(5, 60_000), offsets_of([3] * 20_000)
    coeff = gaussian(20_000, 5, torch.float64, seed=1)
    blocks = rows.double().view(5, 20_000, 3).transpose(0, 1)
    torch.testing.assert_close(call("layer_gram", rows, offsets), blocks @ blocks.mT, rtol=1e-12, atol=1e-12)
    step = torch.einsum("lmc,lm->lc", blocks, coeff).flatten()
    torch.testing.assert_close(call("layer_combine", rows, offsets, coeff).double(), step, rtol=1e-6, atol=1e-6)
    _, squares = call("puc_track", rows[0].clone(), torch.ones(60_000, dtype=torch.uint8), 0, 1, offsets)
    torch.testing.assert_close(squares, blocks[:, 0].square().sum(1), rtol=1e-12, atol=0)
