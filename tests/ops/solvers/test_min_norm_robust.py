# SPDX-License-Identifier: Apache-2.0
"""``min_norm`` on degenerate matrices at every scale: batching, determinism, shapes, errors, and fuzzing."""

import numpy as np
import pytest
import torch
from qp_cases import families, gram_of, relative_gap

from fl_lightning import ops, solvers
from fl_lightning.ops import _active_set, _gram_problems


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


def test_ties_fall_to_the_lowest_index():
    one = torch.ones(4, 4, dtype=torch.float64)
    assert solvers.min_norm(one).tolist() == [1, 0, 0, 0]
    assert solvers.min_norm(0 * one).tolist() == [1, 0, 0, 0]
    rows = torch.tensor([[1.0, 1.0], [1.0, -1.0], [1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    assert solvers.min_norm(rows @ rows.T).tolist() == [0.5, 0.5, 0, 0]


def test_a_zero_row_is_optimal():
    rows = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[2] = rows[4] = 0
    assert solvers.min_norm(rows @ rows.T).tolist() == [0, 0, 1, 0, 0, 0]


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
