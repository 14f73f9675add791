# SPDX-License-Identifier: Apache-2.0
"""Device code of the products for Hopper, run on the processor."""

import pytest
import torch
from implementations import gaussian as normal
from implementations import offsets_of
from simt_library import generator, of_kind
from test_simt_slices import check

from fl_lightning.ops import _reference as reference

SIZES = (0, 300, 1, 3, 258, 33)
LAYOUTS = ((0, 0), (1, 0), (3, 2), (2, 2), (4, 4), (7, 1))  # columns before and behind the matrix in its memory

OFFSETS = offsets_of(SIZES)


def whole_numbers(m, n=int(OFFSETS[-1]), layout=0, dtype=torch.float32):
    """Small ones, between NaNs."""
    lead, pad = LAYOUTS[layout]
    wide = torch.full((m, lead + n + pad), torch.nan, dtype=dtype)
    wide[:, lead : lead + n] = torch.randint(-3, 4, (m, n), generator=generator(m))
    return wide[:, lead : lead + n]


@pytest.fixture
def hopper(simt):
    """A device that has the kernel."""
    yield simt.capability(9)
    simt.capability(8)


def relative(gram, rows, offsets):
    """The errors by the products of the two norms."""
    exact = reference.layer_gram(rows, offsets)
    norms = exact.diagonal(dim1=1, dim2=2).sqrt()
    return (gram - exact).abs() / (norms[:, :, None] * norms[:, None, :]).clamp(min=1e-300)


def check_whole_numbers(found, rows, others=None, offsets=OFFSETS):
    """A product too many or too few is 1 at least. What is lost of each is 2^-22 of it at most, of 16 bits nothing."""
    columns = rows if others is None else others
    want = reference.layer_cross_gram(rows, columns, offsets)
    assert torch.equal(found.round(), want)
    if others is None:
        assert torch.equal(found, found.mT)
    most = reference.layer_cross_gram(rows.abs(), columns.abs(), offsets)
    assert ((found - want).abs() <= (2**-21 if rows.dtype == torch.float32 else 0) * most).all()


@pytest.mark.parametrize("m", [17, 25, 33, 40, 41, 65, 81, 128])
def test_gram(hopper, m):
    rows = whole_numbers(m, layout=m % len(LAYOUTS))
    check_whole_numbers(hopper.layer_gram(rows, OFFSETS), rows)


@pytest.mark.parametrize(("m", "dtype"), [(11, torch.float16), (33, torch.bfloat16), (66, torch.float16)])
def test_gram_of_16_bits(hopper, m, dtype):
    rows = whole_numbers(m, layout=3, dtype=dtype)
    check_whole_numbers(hopper.layer_gram(rows, OFFSETS), rows)


@pytest.mark.parametrize(
    ("m", "h", "dtype"),
    [
        (1, 1, torch.float32),
        (3, 10, torch.float32),
        (17, 16, torch.float32),
        (66, 9, torch.float32),
        (12, 33, torch.float32),
        (66, 40, torch.float32),
        (5, 10, torch.bfloat16),
        (70, 17, torch.float16),
    ],
)
def test_cross_gram(hopper, m, h, dtype):
    rows, others = (whole_numbers(count, layout=layout, dtype=dtype) for count, layout in ((m, 3), (h, 4)))
    check_whole_numbers(hopper.layer_cross_gram(rows, others, OFFSETS), rows, others)


def test_many_layers(hopper):
    offsets = offsets_of([(7 * i) % 13 if i % 5 else 0 for i in range(68)] + [1300, 1015])
    rows = whole_numbers(34, n=int(offsets[-1]))
    check_whole_numbers(hopper.layer_gram(rows, offsets), rows, offsets=offsets)


@pytest.mark.parametrize(("m", "n"), [(40, 4000)])
@pytest.mark.parametrize(
    ("kind", "bound"), [("gaussian", 3e-7), ("absolute", 5e-7), ("constant", 8e-7), ("lognormal", 5e-7)]
)
def test_accuracy(hopper, kind, bound, m, n):
    rows = of_kind(kind, normal(m, n))
    offsets = offsets_of([n])
    assert relative(hopper.layer_gram(rows, offsets), rows, offsets).max() <= bound


# The worst of all for this kernel, where r is large or nothing, and where s has the next exponent.
@pytest.mark.parametrize("worst", [1.2509766, 1 + 2**-10 - 2**-22, 1 + 2**-10 - 2**-23, 1.5, 1.9990234375, 1.9999999])
def test_numbers_that_split_badly(hopper, worst):
    rows, offsets = torch.full((33, 2000), worst), offsets_of([2000])
    assert relative(hopper.layer_gram(rows, offsets), rows, offsets).max() <= 8e-7


@pytest.mark.parametrize("m", [34, 81])
def test_nan_and_overflow_stay_where_they_are(hopper, m):
    rows = normal(m, int(OFFSETS[-1]), seed=5)
    rows[1, 200] = torch.nan
    rows[2] *= 1e25  # its square is too large for float32
    rows[3, 400], rows[4, 10] = torch.inf, 3.4e38
    rows[5, 300:] = 0
    rows[6, 320] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    got, want = hopper.layer_gram(rows, OFFSETS), reference.layer_gram(rows, OFFSETS)
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert got[1, 1].isnan().all()
    assert got[1, 2, 2] > 1e50
    assert torch.equal(got.isnan(), want.isnan())


def test_a_square_alone_is_too_large(hopper):
    rows, offsets = normal(34, 300), offsets_of([300])
    rows[33] *= 1e25
    got, want = hopper.layer_gram(rows, offsets), reference.layer_gram(rows, offsets)
    assert got[0, 33, 33] > 1e50
    torch.testing.assert_close(got[0, 33, 33], want[0, 33, 33])


def test_same_bits_under_every_schedule(kernels):
    rows, offsets = normal(40, 400), offsets_of([300, 100])
    try:
        kernels.capability(9)
        want = kernels.schedule("forward").layer_gram(rows, offsets)
        for name in ("reverse", "random", "low_warp", "high_warp"):
            assert torch.equal(kernels.schedule(name).layer_gram(rows, offsets), want), name
    finally:
        kernels.capability(8)


@pytest.mark.parametrize(("m", "dtype", "slices"), [(34, torch.float32, 2), (11, torch.bfloat16, 3)])
def test_columns_may_be_divided(hopper, m, dtype, slices):
    """Slices in memory of their own, whose addresses are others: there no row of 16 bits begins at an odd one."""
    offsets = offsets_of([1, 8292, 0, 7892 if slices > 2 else 0, 300])
    rows = normal(m, int(offsets[-1])).to(dtype)
    whole = check(lambda at, own, n: hopper.layer_gram(rows[:, at].clone(), own, n), offsets, range(slices))
    assert relative(whole, rows, offsets).max() <= 3e-7


def test_columns_of_two_matrices_may_be_divided(hopper):
    offsets = offsets_of([9000, 485])
    rows, others = normal(3, 9485).to(torch.bfloat16), normal(5, 9485, seed=1).to(torch.bfloat16)
    check(
        lambda at, own, n: hopper.layer_cross_gram(rows[:, at].clone(), others[:, at].clone(), own, n),
        offsets,
        range(2),
    )


def test_others_that_are_not_finite(hopper):
    rows, others = normal(3, int(OFFSETS[-1])), normal(2, int(OFFSETS[-1]), seed=1)
    rows[1, 7], others[1, 400] = torch.inf, torch.nan
    got, want = (ops.layer_cross_gram(rows, others, OFFSETS) for ops in (hopper, reference))
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("m", "h", "has"),
    [(10, 0, False), (16, 0, False), (40, 0, True), (129, 0, False), (16, 16, False), (129, 20, False)],
)
def test_which_rows_have_the_kernel(hopper, m, h, has):
    """The others, such as ten of 16 bits, have the bits of a device without it."""
    offsets = offsets_of([300])
    rows, others = normal(m, 300).to(torch.bfloat16 if m == 10 else torch.float32), normal(h, 300, seed=1)

    def products():
        return hopper.layer_cross_gram(rows, others, offsets) if h else hopper.layer_gram(rows, offsets)

    got = products()
    hopper.capability(8)
    assert torch.equal(got, products()) != has
