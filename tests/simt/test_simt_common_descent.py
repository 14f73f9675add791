# SPDX-License-Identifier: Apache-2.0
"""Device code of ``common_descent``, run on the processor."""

import math

import pytest
import torch
from descent_cases import BOUNDS, descent_on_vectors, not_quite_symmetric, opposed, opposed_among_ten, vectors_of

from fl_lightning.ops import _common_descent as reference


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("given", [False, True], ids=["equal", "scaled"])
@pytest.mark.parametrize("online", [1, 2, 4])
def test_directions_are_those_of_the_vectors(simt, online, given):
    rows, weights = vectors_of(online, 2), torch.randn(online, generator=torch.Generator().manual_seed(3)).double()
    scale = torch.linspace(0.2, 2, 8 * (online + 2), dtype=torch.float64).view(8, -1).clone() if given else None
    if given:
        scale[::3, 0] = scale[1::3, -1] = 0
    for fair in (None, weights):
        coeff, solved, has_fair_row = simt.common_descent(rows @ rows.mT, online, scale, fair, *BOUNDS)
        for i, vectors in enumerate(rows):
            wanted = descent_on_vectors(vectors, online, None if scale is None else scale[i], fair)
            torch.testing.assert_close(coeff[i] @ vectors, wanted.direction, rtol=1e-7, atol=1e-8 * wanted.size)
            assert bool(has_fair_row[i]) == wanted.fair
            if wanted.clear:
                assert bool(solved[i]) == wanted.solved, i
    assert has_fair_row.any()


@pytest.mark.parametrize("k", [1, 3, 33, 76, 139])
def test_it_agrees_with_the_reference(simt, k):
    """76 rows take more shared memory than a launch has without asking, 139 more than this device has."""
    generator = torch.Generator().manual_seed(k)
    rows = torch.randn(2, k, k + 5, generator=generator, dtype=torch.float64) + 0.3
    gram, online = rows @ rows.mT, max(1, 2 * k // 3)
    weights = torch.randn(online, generator=generator, dtype=torch.float64)
    scale = torch.rand(2, k, generator=generator, dtype=torch.float64) * (torch.arange(k) % 4 != 3)
    cases = ((None, weights), (scale, None)) if k > 40 else ((None, None), (None, weights), (scale, weights))
    for given, fair in cases:
        found = simt.common_descent(gram, online, given, fair, *BOUNDS)
        wanted = reference.common_descent(gram, online, given, fair, *BOUNDS)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_bounds(simt):
    """Of lengths, beside the lower median of those that are not 0; of the fair row; of directions and slopes."""
    gram = torch.diag(vector(0.0, 1e9, 2.0, 1.0, 2.02e-8, 1.98e-8, 5.0).square())[None]
    few = [False, True, True, True, True, False, True]
    for online, counts in ((4, few), (3, few), (2, [False, True] + 5 * [False]), (1, 7 * [False])):
        coeff, solved, _ = simt.common_descent(gram, online, None, None, 1e-8, 0.0, 0.0)
        assert (coeff[0] != 0).tolist() == counts
        assert solved.all()
    equal = torch.ones(1, 4, 4, dtype=torch.float64)  # four equal rows: each is as long as the median
    assert simt.common_descent(equal, 4, None, None, 0.999, 1e-4, 0.0)[0].sum() == 1
    assert simt.common_descent(equal, 4, None, None, 1.0, 1e-4, 0.0)[0].sum() == 0
    for angle, wanted in ((2e-4, True), (1e-4, False)):
        rows = 3 * torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
        coeff, _, fair = simt.common_descent((rows @ rows.T)[None], 2, None, vector(1, -1), 1e-8, 1e-4, 0.0)
        assert bool(fair) == wanted
        size = 3 / math.sqrt(2) if wanted else 3.0  # between a row and the fair row at right angles to it; or a row
        assert float((coeff[0] @ rows).norm()) == pytest.approx(size, rel=1e-3)
    for size, rounding, wanted in (
        (2e-4, 0.0, True),
        (0.5e-4, 0.0, False),
        (1e-3, 0.9e-6, True),
        (1e-3, 1.1e-6, False),
    ):
        rows = 3 * opposed(size)
        coeff, solved, _ = simt.common_descent((rows @ rows.T)[None], 2, None, None, 1e-8, 1e-4, rounding)
        assert bool(solved) == wanted
        torch.testing.assert_close(coeff, torch.full((1, 2), 0.5, dtype=torch.float64))


def test_a_direction_is_measured_by_the_root_of_the_mean_square(simt):
    for size, long_enough in ((1.5e-4, True), (0.9e-4, False)):
        rows, scale = opposed_among_ten(size), torch.ones(1, 10, dtype=torch.float64)
        assert bool(simt.common_descent((rows @ rows.T)[None], 10, scale, None, 1e-8, 1e-4, 1e-16)[1]) == long_enough


def test_matrices_that_are_not_quite_symmetric(simt):
    found, wanted = (simt.common_descent(gram, 4, None, None, *BOUNDS)[0] for gram in not_quite_symmetric())
    assert torch.equal(found, wanted)


def test_only_online_rows_have_to_fall_and_to_be_there(simt):
    rows = torch.eye(3, dtype=torch.float64)
    rows[2] = -rows[0]
    scale = torch.tensor([[1.0, 1, 1], [0, 1, 1], [0, 0, 1], [1, 1, 0]], dtype=torch.float64)
    gram = (rows @ rows.T).expand(4, 3, 3).contiguous()
    coeff, solved, fair = simt.common_descent(gram, 2, scale, vector(0, 0), *BOUNDS)
    assert solved.tolist() == [False, True, True, True]
    assert coeff[2].tolist() == [0, 0, 0]
    torch.testing.assert_close(coeff[1], vector(0, 0.5, 0.5))
    assert not fair.any()
    long, ones = torch.diag(vector(1, 1e8))[None], torch.ones(1, 2, dtype=torch.float64)
    for online in (1, 2):  # rounding could turn the second row's slope around
        assert bool(simt.common_descent(long, online, ones, None, 1e-8, 1e-4, 2e-4)[1]) == (online == 1)


def test_what_is_not_finite_marks_its_own_matrix(simt):
    for bad in (math.nan, math.inf):
        gram = torch.eye(3, dtype=torch.float64).repeat(4, 1, 1)
        gram[1, 2, 0] = gram[2, 1, 1] = bad
        scale = torch.ones(4, 3, dtype=torch.float64)
        scale[3, 2] = bad
        coeff, solved, fair = simt.common_descent(gram, 2, scale, vector(1, 2), *BOUNDS)
        assert coeff.isnan().all(1).tolist() == [False, True, True, True]
        assert solved.tolist() == fair.tolist() == [True, False, False, False]
        coeff, solved, fair = simt.common_descent(gram, 2, None, vector(1, bad), *BOUNDS)
        assert coeff.isnan().all()
        assert not (solved | fair).any()
    huge = 1e300 * torch.eye(2, dtype=torch.float64)[None]  # twice a factor, a product is not finite
    coeff, solved, _ = simt.common_descent(huge, 2, torch.full((1, 2), 1e10, dtype=torch.float64), None, *BOUNDS)
    assert coeff.isnan().all()
    assert not solved.any()


@pytest.mark.parametrize("k", [9, 75])
def test_it_has_the_same_bits_under_every_schedule(kernels, k):
    rows = torch.randn(2, k, k // 2, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    arguments = (rows @ rows.mT, k // 2, None, torch.linspace(-1, 1, k // 2, dtype=torch.float64), *BOUNDS)
    want = kernels.schedule("forward").common_descent(*arguments)
    for name in ("reverse", "random", "low_warp", "high_warp"):
        assert all(map(torch.equal, kernels.schedule(name, 1).common_descent(*arguments), want)), name
