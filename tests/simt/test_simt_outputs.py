# SPDX-License-Identifier: Apache-2.0
"""Device code that stores vectors, adds to outputs of another dtype, sums again what overflowed, or brings in numbers
of the host."""

import itertools

import pytest
import simt_library
import torch
from implementations import DTYPES, beside_ties, offsets_of
from simt_library import generator

from fl_lightning.ops import _reference as reference

SIZES = (0, 1, 3, 129, 1000, 0, 300, 2100, 77)
OFFSETS = offsets_of(SIZES)
N = int(OFFSETS[-1])


def whole_numbers(*shape, seed=0):
    """Small ones: every product and sum is exact, so a single wrong or missing one shows."""
    return torch.randint(-3, 4, shape, generator=generator(seed)).double()


@pytest.fixture(params=[simt_library.ALIGNED, simt_library.ODD], ids=["aligned", "odd"])
def placed(simt, request):
    """The kernels, with outputs that begin where the widest vectors may be stored, or where none may."""
    return simt.outputs(request.param)


@pytest.mark.parametrize("lead", [0, 1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_combinations_are_stored_in_vectors_of_any_width(placed, dtype, lead):
    rows = whole_numbers(3, N + 8).to(dtype)[:, lead : lead + N]
    coeff, before = whole_numbers(len(SIZES), 5, seed=1), whole_numbers(N, seed=2).to(dtype)
    own = coeff[:, :3].contiguous()
    want = reference.layer_combine(rows, OFFSETS, own)
    assert torch.equal(placed.layer_combine(rows, OFFSETS, own), want)
    assert torch.equal(placed.layer_combine(rows, OFFSETS, own, add=before), want + before)
    want = reference.layer_cross_combine(rows, rows[:2], OFFSETS, coeff)
    assert torch.equal(placed.layer_cross_combine(rows, rows[:2], OFFSETS, coeff), want)
    keep, weights = torch.full((3, -(-N // 32)), 0x5A5A5A5A, dtype=torch.int32), torch.tensor([1.0, 2.0, 1.0])
    want = reference.puc_combine(rows, keep, weights)
    assert torch.equal(placed.puc_combine(rows, keep, weights), want)


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_combinations_are_added_to_any_dtype_and_rounded_once(placed, dtype, out):
    rows = torch.randn(9, N + 4, generator=generator(3)).to(dtype)[:, 2 : N + 2]
    coeff = torch.randn(len(SIZES), 9, generator=generator(4), dtype=torch.float64)
    before = torch.randn(N, generator=generator(5)).to(out)
    exact = before.to(torch.float64, copy=True)
    reference.layer_combine_add(exact, rows, OFFSETS, coeff)
    got = placed.layer_combine_mixed(rows, OFFSETS, coeff, before)
    torch.testing.assert_close(got.double(), exact, rtol=max(torch.finfo(out).eps, 1e-13), atol=1e-12)
    whole = whole_numbers(9, N).to(dtype)
    want = before.double() + 2 * whole.double().sum(0)
    assert torch.equal(placed.layer_combine_mixed(whole, OFFSETS, 0 * coeff + 2, before), want.to(out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_numbers_are_those_of_the_processor(simt, dtype):
    rows, coeff, want = beside_ties(dtype)
    assert torch.equal(simt.layer_combine(rows, torch.tensor([0, rows.shape[1]]), coeff), want)


@pytest.mark.parametrize("count", [0, 1, 447, 448, 449, 5000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8])
def test_numbers_of_the_host_arrive(placed, dtype, count):
    numbers = torch.randint(0, 2, (count * 8 // dtype.itemsize,), generator=generator(count)).to(dtype)
    assert torch.equal(placed.copy_in(numbers), numbers)


@pytest.mark.parametrize(("driver", "launches"), [(12000, 36), (12010, 4)])
def test_coefficients_of_many_layers_arrive_in_few_launches(simt, driver, launches):
    """Those of ResNet-50 and 100 clients; kernels take eight times as many arguments since CUDA 12.1."""
    numbers = torch.randn(161, 100, dtype=torch.float64, generator=generator(9))
    simt.launches()
    assert torch.equal(simt.driver(driver).copy_in(numbers), numbers)
    assert simt.driver(12010).launches() == launches


HARM = {
    "one NaN": lambda rows: rows[1, 700].fill_(torch.nan),
    "a row of NaN": lambda rows: rows[1].fill_(torch.nan),
    "one infinity": lambda rows: rows[1, 1300].fill_(torch.inf),
    "a row of infinities": lambda rows: rows[1].fill_(torch.inf),
    "both": lambda rows: (rows[0, 300].fill_(-torch.inf), rows[2, 301].fill_(torch.nan)),
    "every row": lambda rows: rows.fill_(torch.nan),
    "large": lambda rows: rows[2].mul_(2.0**80),  # products do not fit float32
}


@pytest.mark.parametrize(
    ("m", "harm"),
    [
        *((5, harm) for harm in HARM),
        *((18, harm) for harm in ("one NaN", "a row of infinities", "both", "large")),
        *((34, harm) for harm in ("a row of NaN", "one infinity", "every row", "large")),
    ],
)
def test_what_float32_cannot_sum_is_summed_again(simt, m, harm):
    """In the direct kernel, in tiles and on tensor cores; also beside other rows, with one step, and with itself."""
    offsets = OFFSETS if m < 10 else OFFSETS[:8]
    rows = whole_numbers(m, int(offsets[-1]), seed=m).float()
    HARM[harm](rows)
    want = reference.layer_gram(rows, offsets)
    assert torch.equal(simt.layer_gram(rows, offsets).nan_to_num(0.5), want.nan_to_num(0.5))
    assert not want.isfinite().all() or harm == "large"
    few = 18 if m > 32 else 4
    cross = simt.layer_cross_gram(rows, rows[:few].clone(), offsets)
    assert torch.equal(cross.nan_to_num(0.5), want[:, :, :few].nan_to_num(0.5))
    for step in (1, 2):
        dots = simt.layer_dots(rows, rows[step].clone(), offsets)
        assert torch.equal(dots.nan_to_num(0.5), want[:, :, step].nan_to_num(0.5))
    squares = simt.layer_squares(rows, offsets)
    assert torch.equal(squares.nan_to_num(0.5), want.diagonal(dim1=1, dim2=2).nan_to_num(0.5))


def test_zero_times_nan_is_nan(simt):
    rows = whole_numbers(5, N).float()
    rows[1, 700] = torch.nan
    coeff = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]).expand(len(SIZES), -1)
    assert simt.layer_combine(rows, OFFSETS, coeff).isnan().nonzero().tolist() == [[700]]


@pytest.mark.parametrize("counts", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tracking_has_the_same_bits_wherever_row_and_counts_lie(simt, dtype, counts):
    values = torch.randn(N, generator=generator(6)).to(dtype)
    past = torch.randint(0, 6, (N,), generator=generator(7)).to(counts)
    theirs = past.clone()
    want_keep, want_norms = reference.puc_track(values, theirs, 2, 5, OFFSETS)
    found = []
    for margin, lead in itertools.product((simt_library.ALIGNED, simt_library.ODD), (0, 1, 2, 4)):
        row, own = torch.empty(N + 8, dtype=dtype)[lead : lead + N].copy_(values), past.clone()
        keep, norms = simt.outputs(margin).puc_track(row, own, 2, 5, OFFSETS)
        assert torch.equal(keep, want_keep)
        assert torch.equal(own, theirs)
        found.append(norms)
    torch.testing.assert_close(found[0], want_norms, rtol=1e-13, atol=0)
    assert all(torch.equal(norms, found[0]) for norms in found)
