# SPDX-License-Identifier: Apache-2.0
"""Projection onto the simplex: optimality conditions, known answers, errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning import solvers


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12))
def test_optimality_conditions(values):
    v = torch.tensor(values, dtype=torch.float64)
    x = solvers.project_simplex(v)
    assert (x >= 0).all()
    assert x.sum().item() == pytest.approx(1, abs=1e-12)
    # One shift for all positive entries; entries at zero lie at or below it.
    shift = (v - x)[x > 0]
    assert (shift.max() - shift.min()).item() <= 1e-12
    assert (v[x == 0] <= shift.max() + 1e-12).all()


@pytest.mark.parametrize(
    ("v", "want"),
    [
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
        ([2.0, 0.6], [1.0, 0.0]),
        ([0.0, 0.0, 0.0, 0.0], [0.25] * 4),
        ([-3.0], [1.0]),
        ([1e30, 1e30, 0.0], [0.5, 0.5, 0.0]),
        ([-1e30, 0.0, 0.5], [0.0, 0.25, 0.75]),
    ],
)
def test_known_answers(v, want):
    assert solvers.project_simplex(torch.tensor(v, dtype=torch.float64)).tolist() == pytest.approx(want, abs=1e-15)


def test_batches_and_dtypes():
    v = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0))
    x = solvers.project_simplex(v)
    assert x.dtype == torch.float32
    assert torch.equal(x[1, 2], solvers.project_simplex(v[1, 2]))
    torch.testing.assert_close(x.sum(-1), torch.ones(3, 4))
    assert torch.equal(solvers.project_simplex(x[..., :0].new_zeros(0, 5)), torch.zeros(0, 5))


@pytest.mark.parametrize(
    ("v", "error", "message"),
    [
        (torch.ones(3, 0), ValueError, r"v must have shape \[..., k\]"),
        (torch.tensor(1.0), ValueError, "k >= 1"),
        (torch.ones(3, dtype=torch.int64), TypeError, "v must be floating point"),
        (torch.tensor([0.0, float("nan")]), ValueError, "v must be finite"),
        (torch.tensor([0.0, float("inf")]), ValueError, "v must be finite"),
    ],
)
def test_wrong_arguments_are_named(v, error, message):
    with pytest.raises(error, match=message):
        solvers.project_simplex(v)
