# SPDX-License-Identifier: Apache-2.0
"""``min_norm`` against exhaustive enumeration and on degenerate matrices at every scale: shapes, errors, fuzzing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qp_cases import enumerate_supports, families, gram_of, objective, relative_gap

from fl_lightning import ops, solvers
from fl_lightning.ops import _active_set, _gram_problems


@settings(max_examples=60, deadline=None)
@given(k=st.integers(2, 8), n=st.integers(1, 9), exponent=st.integers(-12, 12), data=st.data())
def test_any_small_problem(k, n, exponent, data):
    whole = data.draw(st.booleans())
    number = st.integers(-3, 3) if whole else st.floats(-1, 1, allow_subnormal=False, width=32)
    rows = np.array(data.draw(st.lists(number, min_size=k * n, max_size=k * n)), dtype=float).reshape(k, n)
    gram = gram_of(rows) * 10.0**exponent
    lam = solvers.min_norm(torch.from_numpy(gram)).numpy()
    assert (lam >= 0).all()
    assert np.abs(lam.sum(-1) - 1).max() <= 1e-12
    assert relative_gap(gram, lam).max() <= 1e-10
    assert abs(objective(gram, lam) - enumerate_supports(gram)) <= 1e-9 * max(np.trace(gram) / k, 1e-300)


def test_leading_dimensions():
    gram = torch.from_numpy(gram_of(np.random.default_rng(0).standard_normal((2, 3, 5, 9))))
    lam = solvers.min_norm(gram)
    assert lam.shape == (2, 3, 5)
    assert torch.equal(lam[1, 2], solvers.min_norm(gram[1, 2]))
    assert solvers.min_norm(gram[:0]).shape == (0, 3, 5)


def test_float32_and_non_contiguous_input():
    gram = torch.from_numpy(gram_of(np.random.default_rng(0).integers(-3, 4, (4, 6, 9)).astype(float)))
    want = solvers.min_norm(gram)
    assert want.dtype == torch.float64
    assert torch.equal(solvers.min_norm(gram.float()), want)
    assert torch.equal(solvers.min_norm(gram.permute(1, 2, 0).contiguous().permute(2, 0, 1)), want)
    assert not solvers.min_norm(gram.requires_grad_()).requires_grad


@pytest.mark.parametrize("kind", ["independent", "opposed", "near duplicates 1e-7", "nearly low rank", "norms spread"])
def test_few_moves(kind, monkeypatch):
    """Adding the row of largest violation would take about 2.5 k moves on opposed pairs."""
    moves = []
    advance = _active_set._advance
    monkeypatch.setattr(_active_set, "_advance", lambda state: moves.append(1) or advance(state))
    solvers.min_norm(torch.from_numpy(families(np.random.default_rng(0), 4, 101)[kind]))
    assert len(moves) <= 1.3 * 101


@pytest.mark.parametrize(
    ("gram", "error", "message"),
    [
        (torch.ones(3), ValueError, r"gram must have shape \[..., k, k\]"),
        (torch.ones(2, 3), ValueError, r"found \[2, 3\]"),
        (torch.ones(0, 0), ValueError, "k >= 1"),
        (torch.ones(2, 2, dtype=torch.int64), TypeError, "gram must be floating point"),
        (torch.full((3, 3), float("nan")), ValueError, "NaN or infinity in 1 of 1 matrices"),
        (
            torch.stack([torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, float("inf")]])]),
            ValueError,
            "in 1 of 2 matrices",
        ),
    ],
)
def test_wrong_arguments_are_named(gram, error, message):
    with pytest.raises(error, match=message):
        solvers.min_norm(gram)


def fuzz(seed, sizes, batch):
    rng = np.random.default_rng(seed)
    count = 0
    for k in sizes:
        for kind, gram in families(rng, batch, k).items():
            scaled = gram * 10.0 ** rng.integers(-12, 13)
            lam, gap = ops.min_norm(torch.from_numpy(scaled))
            assert (lam >= 0).all(), (kind, k)
            assert ((lam.sum(1) - 1).abs() <= 1e-12).all(), (kind, k)
            assert (gap <= 1e-12).all(), (kind, k, gap.max())
            assert relative_gap(scaled, lam.numpy()).max() <= 1e-10, (kind, k)
            count += len(lam)
    return count


@pytest.fixture
def first_search_only(monkeypatch):
    """The second searches, for indefinite matrices, would hide faults of the first."""
    monkeypatch.setattr(_gram_problems, "_RIDGES", ())


@pytest.mark.usefixtures("first_search_only")
def test_fuzz():
    assert fuzz(0, (2, 3, 4, 5, 7, 8, 13, 24, 35, 50), 16) > 4000
