# SPDX-License-Identifier: Apache-2.0
"""Gram matrices, inner products and combinations: values, accuracy, layouts of memory, dtypes, errors."""

from itertools import pairwise

import pytest
import torch

from fl_lightning import ops
from fl_lightning.ops import _reference

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OFFSETS = torch.tensor([0, 7, 7, 640, 1001])  # the second layer is empty


def integers(m, n, dtype=torch.float32, seed=0):
    """Small whole numbers: every product and sum is exact in every dtype used for it."""
    return torch.randint(-3, 4, (m, n), generator=torch.Generator().manual_seed(seed)).to(dtype)


def gaussian(m, n, seed=0):
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed))


def per_layer(left, right, offsets):
    starts = offsets.tolist()
    pieces = [left[:, a:b].double() @ right[:, a:b].double().T for a, b in pairwise(starts)]
    return torch.stack(pieces)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 10, 41])
def test_products_are_exact_on_whole_numbers(m, dtype):
    rows, others = integers(m, 1001, dtype), integers(3, 1001, dtype, seed=1)
    gram = ops.layer_gram(rows, OFFSETS)
    assert gram.dtype == torch.float64
    assert torch.equal(gram, per_layer(rows, rows, OFFSETS))
    assert gram[1].abs().sum() == 0
    assert torch.equal(ops.layer_cross_gram(rows, others, OFFSETS), per_layer(rows, others, OFFSETS))
    assert torch.equal(ops.layer_dots(rows, others[0], OFFSETS), per_layer(rows, others[:1], OFFSETS)[:, :, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 10, 41])
def test_chosen_products(m, dtype):
    """Exactly those of the rows that are chosen, in their order, and nothing of the others."""
    offsets = torch.tensor([0, 7, 7, 3000, 9001])
    rows, others = integers(m, 9001, dtype), integers(43, 9003, torch.float32, seed=1)[:, 1:9002]
    others = others if m == 10 else others.to(dtype)
    for chosen in ([], [40], [7, 7], [42, 0, 5, 30, 6], list(range(0, 42, 2)), list(range(42, 0, -1))):
        poisoned = others.clone()
        poisoned[sorted(set(range(43)) - set(chosen))] = torch.nan
        got = ops.layer_cross_gram(rows, poisoned, offsets, torch.tensor(chosen, dtype=torch.int64))
        assert torch.equal(got, per_layer(rows, others[chosen], offsets))


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_of_a_row_do_not_depend_on_the_others(dtype):
    rows, offsets = gaussian(5, 20_000).to(dtype), torch.tensor([0, 7_000, 7_000, 19_990, 20_000])
    squares = ops.layer_squares(rows, offsets)
    assert squares.shape == (4, 5)
    for place, row in enumerate(rows):
        assert torch.equal(squares[:, place], ops.layer_gram(row[None], offsets)[:, 0, 0])
        assert torch.equal(squares[:, place : place + 1], ops.layer_squares(row[None].clone(), offsets))
    torch.testing.assert_close(squares, ops.layer_gram(rows, offsets).diagonal(dim1=1, dim2=2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_combination_is_exact_on_whole_numbers(dtype):
    rows = integers(5, 1001, dtype)
    coeff = integers(4, 5, torch.float64, seed=2)
    want = torch.cat(
        [coeff[i] @ rows[:, a:b].double() for i, (a, b) in enumerate([(0, 7), (7, 7), (7, 640), (640, 1001)])]
    )
    step = ops.layer_combine(rows, OFFSETS, coeff)
    assert step.dtype == dtype
    assert torch.equal(step.double(), want)
    out = torch.ones(1001, dtype=torch.float32)
    assert ops.layer_combine(rows, OFFSETS, coeff.to(dtype), out) is out
    assert torch.equal(out.double(), want + 1)


@pytest.mark.parametrize(("kind", "bound"), [("gaussian", 1e-7), ("constant", 5e-7), ("lognormal", 5e-7)])
def test_error_is_small_against_the_norms(kind, bound):
    n = 120_000
    rows = gaussian(10, n)
    if kind == "constant":
        rows = (torch.arange(10.0)[:, None] * 0.1 + 0.3).expand(10, n).contiguous()
    elif kind == "lognormal":
        rows = rows.mul(2).exp()
    offsets = torch.tensor([0, 100_000, 100_001, 119_000, n])
    exact = per_layer(rows, rows, offsets)
    norms = exact.diagonal(dim1=1, dim2=2).sqrt()
    scale = norms[:, :, None] * norms[:, None, :]
    assert ((ops.layer_gram(rows, offsets) - exact).abs() <= bound * scale).all()
    assert ((ops.layer_cross_gram(rows, rows[:4], offsets) - exact[:, :, :4]).abs() <= bound * scale[:, :, :4]).all()
    assert ((ops.layer_dots(rows, rows[3], offsets) - exact[:, :, 3]).abs() <= bound * scale[:, :, 3]).all()


def test_reference_sums_in_float64():
    rows = gaussian(12, 60_000)
    offsets = torch.tensor([0, 60_000])
    exact = per_layer(rows, rows, offsets)
    torch.testing.assert_close(_reference.layer_gram(rows, offsets), exact, rtol=1e-12, atol=1e-9)
    # Terms of size 1e8 cancel to 1: float32 sums would lose it.
    rows = torch.tensor([[1e8], [1.0], [-1e8]])
    step = ops.layer_combine(rows, torch.tensor([0, 1]), torch.ones(1, 3))
    assert step.item() == 1.0


@pytest.mark.parametrize("m", [1, 3, 10, 70])
def test_gram_is_exactly_symmetric_over_many_blocks(m):
    rows = gaussian(m, 50_000 if m < 50 else 12_000)
    offsets = torch.tensor([0, 5, rows.shape[1]])
    gram = ops.layer_gram(rows, offsets)
    assert torch.equal(gram, gram.transpose(1, 2))
    gram = _reference.layer_gram(rows, offsets)
    assert torch.equal(gram, gram.transpose(1, 2))
    torch.testing.assert_close(gram, per_layer(rows, rows, offsets), rtol=1e-11, atol=1e-9)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T.contiguous().T,
        lambda x: x.repeat_interleave(2, 1)[:, ::2],
        lambda x: x.repeat(1, 2)[:, : x.shape[1]],
    ],
    ids=["transposed", "strided", "padded"],
)
def test_rows_need_not_be_contiguous(view):
    rows = integers(4, 1001)
    other = view(rows)
    assert not other.is_contiguous()
    coeff = integers(4, 4, torch.float64)
    assert torch.equal(ops.layer_gram(other, OFFSETS), ops.layer_gram(rows, OFFSETS))
    assert torch.equal(ops.layer_cross_gram(rows, other, OFFSETS), ops.layer_gram(rows, OFFSETS))
    assert torch.equal(ops.layer_dots(other, other[1], OFFSETS), ops.layer_dots(rows, rows[1], OFFSETS))
    assert torch.equal(ops.layer_combine(other, OFFSETS, coeff), ops.layer_combine(rows, OFFSETS, coeff))
    out = torch.zeros(2002)[::2]
    ops.layer_combine(rows, OFFSETS, coeff.T.contiguous().T, out)
    assert torch.equal(out, ops.layer_combine(rows, OFFSETS, coeff))


def test_no_remembered_rows_and_no_columns():
    rows = integers(3, 1001)
    assert ops.layer_cross_gram(rows, rows[:0], OFFSETS).shape == (4, 3, 0)
    nothing = torch.tensor([0, 0])
    assert torch.equal(ops.layer_gram(rows[:, :0], nothing), torch.zeros(1, 3, 3, dtype=torch.float64))
    assert ops.layer_combine(rows[:, :0], nothing, torch.ones(1, 3)).shape == (0,)


def test_mixed_dtypes():
    rows = integers(3, 1001)
    half = integers(2, 1001, torch.bfloat16, seed=4)
    assert torch.equal(ops.layer_cross_gram(rows, half, OFFSETS), per_layer(rows, half, OFFSETS))
    assert torch.equal(ops.layer_dots(rows, half[0], OFFSETS), per_layer(rows, half[:1], OFFSETS)[:, :, 0])


def test_nan_propagates_only_to_what_depends_on_it():
    rows = integers(3, 1001)
    rows[1, 700] = float("nan")
    gram = ops.layer_gram(rows, OFFSETS)
    assert gram[3, 1].isnan().all()
    assert gram[3, :, 1].isnan().all()
    assert gram[3][[0, 2]][:, [0, 2]].isfinite().all()
    assert gram[:3].isfinite().all()
    assert ops.layer_dots(rows, rows[0], OFFSETS).isnan().nonzero().tolist() == [[3, 1]]
    coeff = torch.ones(4, 3)
    coeff[:, 1] = 0
    assert ops.layer_combine(rows, OFFSETS, coeff).isnan().nonzero().tolist() == [[700]]


@pytest.mark.parametrize("m", [1, 2, 10, 41])
def test_same_bits_with_one_and_two_threads(m):
    n = 150_000 if m <= 10 else 30_000
    rows, others = gaussian(m, n), gaussian(7, n, seed=1)
    offsets = torch.tensor([0, 20_000, n])
    coeff = gaussian(2, m, seed=2).double()

    def results():
        return (
            ops.layer_gram(rows, offsets),
            ops.layer_cross_gram(rows, others, offsets),
            ops.layer_dots(rows, others[0], offsets),
            ops.layer_combine(rows, offsets, coeff),
        )

    one = results()
    torch.set_num_threads(2)
    two = results()
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_results_require_no_gradients():
    rows = gaussian(2, 10).requires_grad_()
    offsets = torch.tensor([0, 10])
    assert not ops.layer_gram(rows, offsets).requires_grad
    out = torch.zeros(10)
    assert not ops.layer_combine(rows, offsets, torch.ones(1, 2), out).requires_grad


ROWS = torch.ones(2, 8)
OFF = torch.tensor([0, 3, 8])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.layer_gram(torch.ones(8), OFF), ValueError, "rows must have shape"),
        (lambda: ops.layer_gram(torch.ones(0, 8), OFF), ValueError, "at least one row"),
        (lambda: ops.layer_gram(ROWS.long(), OFF), TypeError, "rows must be float64, .* found torch.int64"),
        (lambda: ops.layer_gram(ROWS.numpy(), OFF), TypeError, "rows must be a tensor"),
        (lambda: ops.layer_gram(ROWS, [0, 3, 8]), TypeError, "offsets must be a tensor, found list"),
        (lambda: ops.layer_gram(ROWS, OFF.int()), TypeError, "offsets must be int64"),
        (lambda: ops.layer_gram(ROWS, OFF[None]), ValueError, "offsets must have shape"),
        (lambda: ops.layer_gram(ROWS, OFF[:1]), ValueError, "at least two entries"),
        (lambda: ops.layer_gram(ROWS, OFF.to("meta")), ValueError, "offsets must be on the CPU"),
        (lambda: ops.layer_gram(ROWS, OFF + 1), ValueError, r"rise from 0 to n = 8 .* found \[1, 4, 9\]"),
        (lambda: ops.layer_gram(ROWS, torch.tensor([0, 7])), ValueError, "rise from 0 to n = 8"),
        (lambda: ops.layer_gram(ROWS, torch.tensor([0, 5, 3, 8])), ValueError, "without decreasing"),
        (lambda: ops.layer_cross_gram(ROWS, torch.ones(2, 7), OFF), ValueError, r"others must have shape \[any, 8\]"),
        (lambda: ops.layer_cross_gram(ROWS, ROWS.to("meta"), OFF), ValueError, "others must be on the rows' device"),
        (lambda: ops.layer_dots(ROWS, torch.ones(7), OFF), ValueError, r"step must have shape \[8\]"),
        (lambda: ops.layer_dots(ROWS, torch.ones(8).int(), OFF), TypeError, "step must be float64"),
        (lambda: ops.layer_combine(ROWS, OFF, torch.ones(3, 2)), ValueError, r"coeff must have shape \[2, 2\]"),
        (lambda: ops.layer_combine(ROWS, OFF, torch.ones(2, 2).to("meta")), ValueError, "coeff must be on the CPU or"),
        (lambda: ops.layer_combine(ROWS, OFF, torch.ones(2, 2), torch.ones(9)), ValueError, "out must have shape"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
