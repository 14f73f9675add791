# SPDX-License-Identifier: Apache-2.0
"""Projections onto dual cones against non-negative least squares on the vectors themselves."""

import pytest
import torch
from scipy.optimize import nnls

import fl_lightning as fl

KINDS = ("random", "rank-deficient", "duplicates", "opposed", "scaled", "correlated", "a zero row")


def rows(kind, m, generator):
    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    vectors = normal(m, 30)
    if kind == "rank-deficient":
        vectors = normal(m, max(1, m // 2)) @ normal(max(1, m // 2), 30)
    elif kind == "duplicates":
        vectors[m // 2 :] = vectors[: m - m // 2].clone()
    elif kind == "opposed" and m > 1:
        vectors[1] = -vectors[0] + 0.01 * normal(30)
    elif kind == "scaled":
        vectors *= 10 ** (6 * torch.rand(m, 1, generator=generator, dtype=torch.float64) - 3)
    elif kind == "correlated":
        vectors += 2 * normal(30)
    elif kind == "a zero row":
        vectors[0] = 0
    return vectors


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("kind", KINDS)
def test_nearest_and_free_of_conflicts(kind, scale):
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    for m in (1, 2, 3, 5, 8, 12):
        vectors = scale * rows(kind, m, generator)
        u = torch.diag(torch.rand(m, generator=generator, dtype=torch.float64))
        v = fl.solvers.dual_cone(vectors @ vectors.T, u)
        assert (v >= u).all()
        for start, found in zip(u, v, strict=True):
            size = float((start @ vectors).norm())
            d = found @ vectors
            _, least = nnls(vectors.T.numpy(), -(start @ vectors).numpy())
            assert float(d.norm()) <= least + 1e-6 * size
            lengths = vectors.norm(dim=1)
            assert float((vectors @ d)[lengths > 0].div(lengths[lengths > 0]).min()) >= -1e-9 * size if size else True


def test_nothing_to_do_and_by_hand():
    gram = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    u = torch.eye(2)
    assert torch.equal(fl.solvers.dual_cone(gram, u), u.double())  # no conflict: v = u
    opposed = torch.tensor([[1.0, -0.5], [-0.5, 1.0]])
    torch.testing.assert_close(
        fl.solvers.dual_cone(opposed, u), torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    )


def test_batches_are_separate_problems():
    vectors = torch.randn(4, 3, 6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = vectors @ vectors.mT
    u = torch.eye(6, dtype=torch.float64).expand(4, 3, 6, 6)
    whole = fl.solvers.dual_cone(gram, u)
    assert whole.shape == (4, 3, 6, 6)
    assert torch.equal(whole[2, 1], fl.solvers.dual_cone(gram[2, 1], u[2, 1]))
    assert fl.solvers.dual_cone(gram[:0], u[:0]).shape == (0, 3, 6, 6)


@pytest.mark.parametrize(
    ("gram", "vectors", "message"),
    [
        (torch.eye(2), torch.ones(2), r"shapes \[..., m, m\] and \[..., r, m\], found \[2, 2\] and \[2\]"),
        (torch.ones(2, 3), torch.ones(1, 3), "shapes"),
        (torch.eye(2), torch.full((1, 2), float("nan")), "vectors must be finite"),
        (torch.full((2, 2), float("inf")), torch.ones(1, 2), "gram must be finite"),
    ],
)
def test_bad_arguments(gram, vectors, message):
    with pytest.raises(ValueError, match=message):
        fl.solvers.dual_cone(gram, vectors)
