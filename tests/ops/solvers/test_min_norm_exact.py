# SPDX-License-Identifier: Apache-2.0
"""``min_norm`` against exhaustive enumeration and closed forms."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qp_cases import enumerate_supports, gram_of, objective, relative_gap

from fl_lightning import solvers


def solved(gram):
    return solvers.min_norm(torch.from_numpy(gram)).numpy()


def judge(gram, lam):
    """On the simplex, and optimal by a gap computed here."""
    assert (lam >= 0).all()
    assert np.abs(lam.sum(-1) - 1).max() <= 1e-12
    assert relative_gap(gram, lam).max() <= 1e-10


@settings(max_examples=60, deadline=None)
@given(k=st.integers(2, 8), n=st.integers(1, 9), exponent=st.integers(-12, 12), data=st.data())
def test_any_small_problem(k, n, exponent, data):
    whole = data.draw(st.booleans())
    number = st.integers(-3, 3) if whole else st.floats(-1, 1, allow_subnormal=False, width=32)
    rows = np.array(data.draw(st.lists(number, min_size=k * n, max_size=k * n)), dtype=float).reshape(k, n)
    gram = gram_of(rows) * 10.0**exponent
    lam = solved(gram)
    judge(gram, lam)
    assert abs(objective(gram, lam) - enumerate_supports(gram)) <= 1e-9 * max(np.trace(gram) / k, 1e-300)


def test_one_row():
    assert solvers.min_norm(torch.tensor([[4.0]])).tolist() == [1.0]
    assert solvers.min_norm(torch.zeros(3, 1, 1)).tolist() == [[1.0]] * 3


@pytest.mark.parametrize(
    ("gram", "want"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], [0.5, 0.5]),
        ([[1.0, 0.0], [0.0, 3.0]], [0.75, 0.25]),
        ([[1.0, 2.0], [2.0, 5.0]], [1.0, 0.0]),
        ([[5.0, 2.0], [2.0, 1.0]], [0.0, 1.0]),
        ([[2.0, 2.0], [2.0, 2.0]], [0.5, 0.5]),
        ([[0.0, 0.0], [0.0, 0.0]], [0.5, 0.5]),
        ([[0.0, 0.0], [0.0, 7.0]], [1.0, 0.0]),
        ([[1.0, -2.0], [-2.0, 4.0]], [2 / 3, 1 / 3]),
    ],
)
def test_two_rows(gram, want):
    assert solvers.min_norm(torch.tensor(gram, dtype=torch.float64)).tolist() == pytest.approx(want, abs=1e-15)
