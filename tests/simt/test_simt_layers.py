# SPDX-License-Identifier: Apache-2.0
"""Device code of the layer kernels, run on the processor, against the pure-torch reference."""

import ctypes

import pytest
import torch
from implementations import DTYPES, offsets_of
from simt_library import KernelError, generator, of_kind

from fl_lightning.ops import _reference as reference

SIZES = (0, 1, 3, 129, 1000, 0, 300, 2100, 77)
OFFSETS = offsets_of(SIZES)


def between_nans(values, lead, pad):
    """The same matrix as a slice of a larger one: its address and row distance change, and NaN surrounds it."""
    wide = torch.full((values.shape[0], values.shape[1] + lead + pad), float("nan"), dtype=values.dtype)
    wide[:, lead : lead + values.shape[1]] = values
    return wide[:, lead : lead + values.shape[1]]


def integers(m, dtype=torch.float32, n=int(OFFSETS[-1]), seed=0, layout=None):
    """Small whole numbers: every product and sum is exact, so a single wrong or missing one shows."""
    values = torch.randint(-3, 4, (m, n), generator=generator(seed + m)).to(dtype)
    lead, pad = ((0, 0), (1, 0), (3, 2), (2, 3), (4, 4), (7, 1))[m % 6 if layout is None else layout]
    return between_nans(values, lead, pad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 16, 17, 33])
def test_gram(simt, m, dtype):
    rows = integers(m, dtype)
    assert torch.equal(simt.layer_gram(rows, OFFSETS), reference.layer_gram(rows, OFFSETS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gram_in_several_blocks(simt, dtype):
    rows, offsets = integers(70, dtype, n=1100), offsets_of([300, 1, 799])
    assert torch.equal(simt.layer_gram(rows, offsets), reference.layer_gram(rows, offsets))


@pytest.mark.parametrize(
    ("m", "h", "dtype", "other"),
    [
        (1, 1, torch.float32, torch.float32),
        (10, 10, torch.float32, torch.float32),
        (16, 3, torch.float32, torch.float32),
        (7, 16, torch.float32, torch.float32),
        (3, 5, torch.float32, torch.bfloat16),
        (10, 33, torch.bfloat16, torch.float32),
        (33, 2, torch.float16, torch.bfloat16),
        (5, 3, torch.float32, torch.float64),
        (2, 4, torch.float64, torch.float16),
        (9, 9, torch.float64, torch.float64),
        (17, 33, torch.float32, torch.float32),
        (66, 20, torch.bfloat16, torch.bfloat16),
        (33, 35, torch.float16, torch.float16),
        (33, 35, torch.float16, torch.float32),
    ],
)
def test_cross_gram(simt, m, h, dtype, other):
    rows, others = integers(m, dtype), integers(h, other, seed=1, layout=(m + 1) % 6)
    got = simt.layer_cross_gram(rows, others, OFFSETS)
    assert torch.equal(got, reference.layer_cross_gram(rows, others, OFFSETS))
    assert simt.layer_cross_gram(rows, others[:0], OFFSETS).shape == (len(SIZES), m, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 7, 8, 9, 17])
def test_dots(simt, m, dtype):
    rows, step = integers(m, dtype), integers(1, dtype, seed=5, layout=m % 4)[0]
    assert torch.equal(simt.layer_dots(rows, step, OFFSETS), reference.layer_dots(rows, step, OFFSETS))
    assert torch.equal(simt.layer_squares(rows, OFFSETS), reference.layer_squares(rows, OFFSETS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [5000, 5001, 5002, 5003])
def test_squares_depend_on_no_address_and_no_other_row(simt, dtype, n):
    offsets = offsets_of([1001, 0, 7, n - 1008])
    values = torch.randn(9, n, generator=generator(8)).to(dtype)
    want = torch.cat([simt.layer_squares(row.clone(), offsets) for row in values.split(1)], 1)
    exact = reference.layer_squares(values, offsets)
    assert ((want - exact).abs() <= 1e-7 * exact).all()
    for before in range(5):
        moved = between_nans(values, before, 3)
        assert torch.equal(simt.layer_squares(moved, offsets), want), f"{before} elements further"
    assert torch.equal(simt.layer_squares(values.flip(0), offsets), want.flip(1))


@pytest.mark.parametrize(("dtype", "total"), [*((dtype, 1 << 27) for dtype in DTYPES), (torch.float32, 1 << 24)])
def test_columns_of_a_large_matrix(simt, dtype, total):
    """Its chunks are so wide that a thread adds up several blocks of columns."""
    rows, offsets = integers(3, dtype, n=9000), offsets_of([100, 8900])
    want = reference.layer_gram(rows, offsets)
    assert torch.equal(simt.layer_gram(rows, offsets, total), want)
    assert torch.equal(simt.layer_cross_gram(rows, rows[:2], offsets, total), want[:, :, :2])
    assert torch.equal(simt.layer_dots(rows, rows[1], offsets, total), want[:, :, 1])
    assert torch.equal(simt.layer_squares(rows, offsets, total), want.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dots_and_combinations_of_aligned_rows_with_others(simt, dtype):
    """Each side is read in vectors as wide as its own addresses allow."""
    rows = between_nans(integers(3, dtype, layout=0), 1, 5)  # a distance that every vector divides
    others = between_nans(integers(2, dtype, seed=3, layout=0), 2, 3)
    coeff = integers(5, torch.float64, n=len(SIZES), layout=0).T.contiguous()
    want = reference.layer_cross_combine(rows, others, OFFSETS, coeff)
    assert torch.equal(simt.layer_cross_combine(rows, others, OFFSETS, coeff), want)
    assert torch.equal(simt.layer_dots(rows, others[0], OFFSETS), reference.layer_dots(rows, others[0], OFFSETS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "h"), [(1, 0), (2, 9), (8, 17)])
def test_combine_two_matrices(simt, m, h, dtype):
    rows, others = integers(m, dtype), integers(h, dtype, seed=3, layout=(m + 1) % 4)
    coeff = integers(m + h, torch.float64, n=len(SIZES), layout=0).T.contiguous()
    coeff[:, m:] *= torch.arange(h) // 8 != 1  # a whole group of rows, and others
    coeff[4, 0] = 0
    rows[coeff[4, :m] == 0, int(OFFSETS[4]) : int(OFFSETS[5])] = torch.nan  # no part in that layer
    got = simt.layer_cross_combine(rows, others, OFFSETS, coeff)
    assert got.isfinite().all()
    assert torch.equal(got, reference.layer_cross_combine(rows, others, OFFSETS, coeff))


def test_combine_two_matrices_of_which_one_row_has_a_part(simt):
    rows, others = integers(8), integers(9, seed=3)
    for chosen, row in enumerate(torch.cat([rows, others])):
        coeff = torch.zeros(len(SIZES), 17, dtype=torch.float64)
        coeff[:, chosen] = 2
        assert torch.equal(simt.layer_cross_combine(rows, others, OFFSETS, coeff), 2 * row)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 33])
def test_combine(simt, m, dtype):
    rows = integers(m, dtype)
    coeff = integers(m, torch.float64, n=len(SIZES), layout=0).T.contiguous()
    want = reference.layer_combine(rows, OFFSETS, coeff)
    assert torch.equal(simt.layer_combine(rows, OFFSETS, coeff), want)
    before = integers(1, dtype, seed=9, layout=0)[0]
    assert torch.equal(simt.layer_combine(rows, OFFSETS, coeff, add=before), want + before)


@pytest.mark.parametrize("count", [300])
def test_many_layers(simt, count):
    sizes = [(7 * i) % 13 if i % 5 else 0 for i in range(count - 2)] + [2049, 4096]
    offsets = offsets_of(sizes)
    rows = integers(3, torch.float32, n=int(offsets[-1]))
    coeff = integers(3, torch.float64, n=count, layout=0).T.contiguous()
    assert torch.equal(simt.layer_gram(rows, offsets), reference.layer_gram(rows, offsets))
    assert torch.equal(simt.layer_cross_gram(rows, rows[:2], offsets), reference.layer_gram(rows, offsets)[:, :, :2])
    assert torch.equal(simt.layer_dots(rows, rows[2], offsets), reference.layer_gram(rows, offsets)[:, :, 2])
    assert torch.equal(simt.layer_combine(rows, offsets, coeff), reference.layer_combine(rows, offsets, coeff))


def test_no_columns(simt):
    rows, nothing = torch.empty(3, 0), torch.tensor([0, 0, 0])
    assert torch.equal(simt.layer_gram(rows, nothing), torch.zeros(2, 3, 3, dtype=torch.float64))
    assert torch.equal(simt.layer_cross_gram(rows, rows, nothing), torch.zeros(2, 3, 3, dtype=torch.float64))
    assert torch.equal(simt.layer_dots(rows, rows[0], nothing), torch.zeros(2, 3, dtype=torch.float64))
    assert simt.layer_combine(rows, nothing, torch.ones(2, 3)).shape == (0,)


def test_repeated_rows(simt):
    rows = integers(1)[0].expand(5, -1)
    assert rows.stride(0) == 0
    assert torch.equal(simt.layer_gram(rows, OFFSETS), reference.layer_gram(rows, OFFSETS))


@pytest.mark.parametrize(
    ("kind", "bound", "m"),
    [
        *(("gaussian", 1e-7, m) for m in (10, 18, 34)),
        *(("absolute", 5e-7, m) for m in (10, 18, 34)),
        ("constant", 5e-7, 34),
        ("lognormal", 5e-7, 34),
    ],
)
def test_accuracy(simt, kind, bound, m):
    offsets = offsets_of([1, 3, 129, 256, 257, 1000, 4001 if m < 33 else 1])
    rows = of_kind(kind, torch.randn(m, int(offsets[-1]), generator=generator(1)))
    exact = reference.layer_gram(rows, offsets)
    norms = exact.diagonal(dim1=1, dim2=2).sqrt()
    scale = norms[:, :, None] * norms[:, None, :]
    gram = simt.layer_gram(rows, offsets)
    bound = max(bound, 2e-7) if m > 32 else bound  # tensor cores
    assert torch.equal(gram, gram.mT)
    assert ((gram - exact).abs() <= bound * scale).all()
    few = 20 if m > 32 else 3
    cross = simt.layer_cross_gram(rows, rows[:few].clone(), offsets)
    assert ((cross - exact[:, :, :few]).abs() <= bound * scale[:, :, :few]).all()
    assert ((simt.layer_dots(rows, rows[1], offsets) - exact[:, :, 1]).abs() <= bound * scale[:, :, 1]).all()
    # Up to 256 columns are summed in float64.
    torch.testing.assert_close(gram[:4], exact[:4], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("m", [10, 17, 34])
def test_same_bits_under_every_schedule(kernels, m):
    offsets = OFFSETS if m < 30 else offsets_of([0, 129, 3, 500])
    rows = torch.randn(m, int(offsets[-1]), generator=generator(6))
    coeff = torch.randn(len(offsets) - 1, m, generator=generator(7))

    def results():
        return (
            kernels.layer_gram(rows, offsets),
            kernels.layer_cross_gram(rows, rows[:2], offsets),
            kernels.layer_dots(rows, rows[3], offsets),
            kernels.layer_squares(rows, offsets),
            kernels.layer_combine(rows, offsets, coeff),
        )

    kernels.schedule("forward")
    want = results()
    for name in ("random", "high_warp"):
        kernels.schedule(name)
        assert all(torch.equal(a, b) for a, b in zip(results(), want, strict=True))


@pytest.mark.parametrize("layout", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensor_cores_on_rows_anywhere_in_memory(simt, dtype, layout):
    offsets = offsets_of([3, 300, 258])
    rows = integers(34, dtype, n=561, layout=layout)
    assert torch.equal(simt.layer_gram(rows, offsets), reference.layer_gram(rows, offsets))


def test_a_device_without_tensor_cores_for_these_numbers(simt):
    """The other kernel's bits: those of the same rows among few others."""
    rows = torch.randn(34, 900, generator=generator(9))
    offsets = offsets_of([900])
    try:
        plain = simt.capability(7).layer_gram(rows, offsets)
    finally:
        simt.capability(8)
    assert torch.equal(plain[:, :20, :20], simt.layer_gram(rows[:20], offsets))
    assert not torch.equal(plain, simt.layer_gram(rows, offsets))


@pytest.mark.parametrize("worst", [1 + 2**-11 - 2**-23, 1 + 2**-12 - 2**-23, 1 + 2**-11, 1.9999999])
def test_tensor_cores_on_numbers_that_split_badly(simt, worst):
    """What two numbers of 11 bits cannot hold of one of 24."""
    rows, offsets = torch.full((33, 900), worst), offsets_of([900])
    exact = 900 * float(rows[0, 0]) ** 2
    assert ((simt.layer_gram(rows, offsets) / exact - 1).abs() <= 5e-7).all()


def test_a_launch_that_cannot_be_is_an_error(simt):
    batch, m = ctypes.c_int64(1 << 32), ctypes.c_int64(3)
    with pytest.raises(KernelError, match="fl_lightning::project_conflicts needs 4294967296 blocks, more than a CUDA"):
        simt.call("project_conflicts", None, batch, m, None, None, None)
