# SPDX-License-Identifier: Apache-2.0
"""Every implementation of the ops on Gram matrices: projections step by step, and points of least norm."""

import pytest
import torch
from implementations import every


def random_gram(batch, m, n, seed=0):
    factors = torch.randn(batch, m, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return factors @ factors.mT


def projected(gram, i, order):
    """FedFV's Algorithm 2 for one update, as a loop over numbers: coefficients of the original updates."""
    m = len(gram)
    coeff, products = [float(j == i) for j in range(m)], list(gram[i])
    for j in order:
        if j == i or gram[j][j] <= 0 or products[j] >= 0:
            continue
        share = products[j] / gram[j][j]
        coeff[j] -= share
        products = [p - share * g for p, g in zip(products, gram[j], strict=True)]
    return coeff


@every
@pytest.mark.parametrize("m", [1, 2, 3, 8, 17, 64])
def test_projections_equal_a_loop(call, m):
    generator = torch.Generator().manual_seed(m)
    gram = random_gram(3, m, max(2, m // 2), seed=m)  # dependent rows among them
    order, keep = torch.randperm(m, generator=generator), torch.rand(m, generator=generator) < 0.3
    coeff = call("project_conflicts", gram, order, keep)
    for matrix, found in zip(gram, coeff, strict=True):
        want = [
            [float(i == j) for j in range(m)] if keep[i] else projected(matrix.tolist(), i, order.tolist())
            for i in range(m)
        ]
        torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@every
def test_projections_without_matrices_and_with_a_zero_update(call):
    order, keep = torch.arange(3), torch.zeros(3, dtype=torch.bool)
    assert call("project_conflicts", torch.zeros(0, 3, 3, dtype=torch.float64), order, keep).shape == (0, 3, 3)
    gram = torch.tensor([[[1.0, -1e-30, -1.0], [-1e-30, 0.0, 0.0], [-1.0, 0.0, 2.0]]], dtype=torch.float64)
    coeff = call("project_conflicts", gram, order, keep)
    assert (coeff[0, [0, 2], 1] == 0).all()
    torch.testing.assert_close(coeff[0, 0], torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64))


@every
def test_a_nan_in_one_matrix_shows_there_and_nowhere_else(call):
    gram = random_gram(3, 4, 6)
    gram[1, 0, 2] = gram[1, 2, 0] = float("nan")
    coeff = call("project_conflicts", gram, torch.arange(4), torch.zeros(4, dtype=torch.bool))
    assert coeff[1, 0].isnan().any()
    assert coeff[1, 2].isnan().any()
    assert coeff[[0, 2]].isfinite().all()
    lam, gap = call("min_norm", gram)
    assert lam[1].isnan().all()
    assert gap[1].isnan()
    assert lam[[0, 2]].isfinite().all()
    assert gap[[0, 2]].isfinite().all()


@every
def test_no_matrices_and_all_zeros(call):
    lam, gap = call("min_norm", torch.zeros(0, 4, 4, dtype=torch.float64))
    assert lam.shape == (0, 4)
    assert gap.shape == (0,)
    lam, gap = call("min_norm", torch.zeros(2, 4, 4, dtype=torch.float64))
    assert lam.tolist() == [[1, 0, 0, 0]] * 2
    assert gap.tolist() == [0, 0]
