# SPDX-License-Identifier: Apache-2.0
"""Gram matrices, inner products and combinations, as the package calls them; test_kernels.py has the numbers."""

import pytest
import torch
from implementations import DTYPES, exact_products, gaussian

from fl_lightning import ops
from fl_lightning.ops import _reference

OFFSETS = torch.tensor([0, 7, 7, 640, 1001])  # the second layer is empty


def integers(m, n, dtype=torch.float32, seed=0):
    """Small whole numbers: every product and sum is exact in every dtype used for it."""
    return torch.randint(-3, 4, (m, n), generator=torch.Generator().manual_seed(seed)).to(dtype)


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
        assert torch.equal(got, exact_products(rows, others[chosen], offsets))


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_of_a_row_do_not_depend_on_the_others(dtype):
    rows, offsets = gaussian(5, 20_000).to(dtype), torch.tensor([0, 7_000, 7_000, 19_990, 20_000])
    squares = ops.layer_squares(rows, offsets)
    assert squares.shape == (4, 5)
    for place, row in enumerate(rows):
        assert torch.equal(squares[:, place], ops.layer_gram(row[None], offsets)[:, 0, 0])
        assert torch.equal(squares[:, place : place + 1], ops.layer_squares(row[None].clone(), offsets))
    torch.testing.assert_close(squares, ops.layer_gram(rows, offsets).diagonal(dim1=1, dim2=2), rtol=1e-6, atol=0)


def test_reference_sums_in_float64():
    rows = gaussian(12, 60_000)
    offsets = torch.tensor([0, 60_000])
    exact = exact_products(rows, rows, offsets)
    torch.testing.assert_close(_reference.layer_gram(rows, offsets), exact, rtol=1e-12, atol=1e-9)
    # Terms of size 1e8 cancel to 1: float32 sums would lose it.
    rows = torch.tensor([[1e8], [1.0], [-1e8]])
    step = ops.layer_combine(rows, torch.tensor([0, 1]), torch.ones(1, 3))
    assert step.item() == 1.0


def test_no_remembered_rows_and_no_columns():
    rows = integers(3, 1001)
    assert ops.layer_cross_gram(rows, rows[:0], OFFSETS).shape == (4, 3, 0)
    nothing = torch.tensor([0, 0])
    assert torch.equal(ops.layer_gram(rows[:, :0], nothing), torch.zeros(1, 3, 3, dtype=torch.float64))
    assert ops.layer_combine(rows[:, :0], nothing, torch.ones(1, 3)).shape == (0,)


def test_results_require_no_gradients_and_an_output_is_written_to_wherever_it_lies():
    rows = gaussian(2, 1001).requires_grad_()
    assert not ops.layer_gram(rows, OFFSETS).requires_grad
    coeff, out = integers(2, 4, torch.float64).T, torch.zeros(2002)[::2]
    assert ops.layer_combine(rows, OFFSETS, coeff, out) is out
    assert not out.requires_grad
    assert torch.equal(out, ops.layer_combine(rows, OFFSETS, coeff))
