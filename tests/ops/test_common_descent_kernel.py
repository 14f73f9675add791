# SPDX-License-Identifier: Apache-2.0
"""Every implementation of ``common_descent``: the vectors it stands for, its bounds, what is left out, batches."""

import math

import pytest
import torch
from descent_cases import BOUNDS, descent_on_vectors, not_quite_symmetric, opposed, opposed_among_ten, vectors_of
from implementations import REFERENCE, compiled, every


def matrices(*batches):
    return torch.stack([rows @ rows.mT for rows in batches])


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@every
@pytest.mark.parametrize("given", [False, True], ids=["equal", "scaled"])
@pytest.mark.parametrize("online", [1, 2, 5])
def test_directions_are_those_of_the_vectors(call, online, given):
    """Against supports tried one by one, on the vectors; with zero, dependent, opposed, long and short rows."""
    rows, weights = vectors_of(online, 2), torch.randn(online, generator=torch.Generator().manual_seed(3)).double()
    scale = None
    if given:
        scale = torch.rand(rows.shape[:2], generator=torch.Generator().manual_seed(4)).double() + 0.1
        scale[::3, 0] = 0
        scale[1::3, -1] = 0
    for fair in (None, weights):
        coeff, solved, has_fair_row = call("common_descent", rows @ rows.mT, online, scale, fair, *BOUNDS)
        for i, vectors in enumerate(rows):
            wanted = descent_on_vectors(vectors, online, None if scale is None else scale[i], fair)
            found = coeff[i] @ vectors
            torch.testing.assert_close(found, wanted.direction, rtol=1e-7, atol=1e-8 * wanted.size)
            assert bool(has_fair_row[i]) == wanted.fair
            if wanted.clear:  # neither its length nor a slope is near its bound
                assert bool(solved[i]) == wanted.solved, i
    assert has_fair_row.any()


@compiled
@pytest.mark.parametrize("k", [1, 2, 3, 9, 33, 76, 170])
def test_compiled_kernels_agree_with_the_reference(call, k):
    """Coefficients, too, where the rows are independent.

    On CUDA 76 rows take more shared memory than a launch has without asking, and 170 more than a device has.
    """
    generator = torch.Generator().manual_seed(k)
    rows = torch.randn(3, k, k + 5, generator=generator, dtype=torch.float64) + 0.3
    gram, online = rows @ rows.mT, max(1, 2 * k // 3)
    weights = torch.randn(online, generator=generator, dtype=torch.float64)
    scale = torch.rand(3, k, generator=generator, dtype=torch.float64) * (torch.arange(k) % 4 != 3)
    for given in (None, scale):
        for fair in (None, weights, torch.zeros_like(weights)):
            found = call("common_descent", gram, online, given, fair, *BOUNDS)
            wanted = REFERENCE("common_descent", gram, online, given, fair, *BOUNDS)
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
            assert found[2].any() == (fair is weights)


@every
def test_rows_count_beside_the_lower_median_of_the_others(call):
    """Lengths 0, 1e9, 2, 1 of the round: the median is 2, and a row counts beyond 2e-8."""
    lengths = [0.0, 1e9, 2.0, 1.0, 2.02e-8, 1.98e-8, 5.0]
    gram = torch.diag(vector(*lengths).square())[None]
    coeff, solved, _ = call("common_descent", gram, 4, None, None, 1e-8, 0.0, 0.0)
    assert (coeff[0] != 0).tolist() == [False, True, True, True, True, False, True]
    assert solved.all()
    steps = coeff[0][[1, 2, 3]] * vector(1e9, 2, 1)
    torch.testing.assert_close(steps, steps[:1].expand(3))  # equally long, and orthogonal
    torch.testing.assert_close(steps[0], vector((1e9 + 3) / 3)[0] / 5)
    few = [False, True, True, True, True, False, True]  # of two lengths the lower one is the median
    for online, wanted in ((3, few), (2, [False, True] + 5 * [False]), (1, 7 * [False])):
        coeff, solved, _ = call("common_descent", gram, online, None, None, 1e-8, 0.0, 0.0)
        assert (coeff[0] != 0).tolist() == wanted  # beside 1e9 the others are nothing; beside nothing, nothing counts
        assert solved.all()


@every
def test_fair_rows_are_as_long_as_the_mean_or_left_out(call):
    """Two rows of length 3 that are nearly equal, and weights (1, -1): the fair row is their short difference."""
    for angle, wanted in ((2e-4, True), (1e-4, False)):
        rows = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
        rows *= 3
        coeff, _, fair = call("common_descent", matrices(rows), 2, None, vector(1, -1), 1e-8, 1e-4, 0.0)
        assert bool(fair) == wanted  # the length over |q| mu is angle / sqrt 2
        if wanted:  # between a row and the fair row, which is at right angles to both and as long
            torch.testing.assert_close((coeff[0] @ rows).norm(), vector(3 / math.sqrt(2))[0], rtol=1e-3, atol=0)
        ones = torch.ones(1, 2, dtype=torch.float64)
        coeff, _, fair = call("common_descent", matrices(rows), 2, ones, vector(1, -1), 1e-8, 1e-4, 0.0)
        assert fair.all()  # it is not made longer with given factors
        assert (coeff[0] @ rows).norm() <= 3 * angle


@every
def test_bounds_of_directions(call):
    for size, expected in ((2e-4, True), (0.5e-4, False), (0.0, False)):
        coeff, solved, _ = call("common_descent", matrices(opposed(size)), 2, None, None, 1e-8, 1e-4, 0.0)
        assert bool(solved) == expected
        torch.testing.assert_close(coeff, torch.full((1, 2), 0.5, dtype=torch.float64))
    for rounding, expected in ((0.0, True), (0.9e-6, True), (1.1e-6, False)):  # the slopes are 9 times 1e-3 squared
        gram = matrices(3 * opposed(1e-3))
        assert bool(call("common_descent", gram, 2, None, None, 1e-8, 1e-4, rounding)[1]) == expected


@every
def test_a_direction_is_measured_by_the_root_of_the_mean_square(call):
    """Of ten rows, not by the root of their sum of squares: two opposed rows leave 1.5e-4 or .9e-4 of the others."""
    for size, long_enough in ((1.5e-4, True), (0.9e-4, False)):
        rows, scale = opposed_among_ten(size), torch.ones(1, 10, dtype=torch.float64)
        coeff, found, _ = call("common_descent", matrices(rows), 10, scale, None, 1e-8, 1e-4, 1e-16)
        assert bool(found) == long_enough
        assert float((coeff[0] @ rows).norm()) == pytest.approx(size, rel=1e-6)


@every
def test_only_online_rows_have_to_fall_and_to_be_there(call):
    rows = torch.eye(3, dtype=torch.float64)
    rows[2] = -rows[0]  # the remembered row opposes the first
    scale = torch.tensor([[1.0, 1, 1], [0, 1, 1], [0, 0, 1], [1, 1, 0]], dtype=torch.float64)
    coeff, solved, fair = call("common_descent", matrices(*[rows] * 4), 2, scale, vector(0, 0), *BOUNDS)
    assert solved.tolist() == [False, True, True, True]
    torch.testing.assert_close(coeff[0] @ rows, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(coeff[1], vector(0, 0.5, 0.5))
    assert coeff[2].tolist() == [0, 0, 0]
    torch.testing.assert_close(coeff[3], vector(0.5, 0.5, 0))
    assert not fair.any()
    long = torch.diag(vector(1, 1e8))[None]  # rounding could turn the second row's slope around
    ones = torch.ones(1, 2, dtype=torch.float64)
    for online in (1, 2):
        assert bool(call("common_descent", long, online, ones, None, 1e-8, 1e-4, 2e-4)[1]) == (online == 1)


@every
def test_what_is_not_finite_marks_its_own_matrix(call):
    for bad in (math.nan, math.inf, -math.inf):
        gram = torch.eye(3, dtype=torch.float64).repeat(4, 1, 1)
        gram[1, 2, 0] = gram[1, 0, 2] = gram[2, 1, 1] = bad
        scale = torch.ones(4, 3, dtype=torch.float64)
        for given in (None, scale):
            coeff, solved, fair = call("common_descent", gram, 2, given, vector(1, 2), *BOUNDS)
            assert coeff.isnan().all(1).tolist() == [False, True, True, False]
            assert coeff[[0, 3]].isfinite().all()
            assert solved.tolist() == fair.tolist() == [True, False, False, True]
        scale[3, 1] = bad
        coeff, solved, fair = call("common_descent", gram, 2, scale, vector(1, 2), *BOUNDS)
        assert coeff.isnan().all(1).tolist() == [False, True, True, True]
        assert solved.tolist() == fair.tolist() == [True, False, False, False]
        coeff, solved, fair = call("common_descent", gram, 2, None, vector(1, bad), *BOUNDS)
        assert coeff.isnan().all()
        assert not (solved | fair).any()


@every
def test_numbers_too_large_for_the_hull_are_marked(call):
    """Each product is finite, twice a factor it is not. The last row is left out."""
    gram, scale = 1e300 * torch.eye(3, dtype=torch.float64)[None], vector(1e10, 1e10, 0)[None]
    coeff, solved, _ = call("common_descent", gram, 2, scale, None, *BOUNDS)
    assert coeff.isnan().all()
    assert not solved.any()


@every
@pytest.mark.parametrize("k", [2, 9, 41])
def test_a_matrix_gives_the_same_bits_alone_in_any_batch_and_with_more_threads(call, k):
    generator = torch.Generator().manual_seed(k)
    rows = torch.randn(1 + 9000 // k**2, k, k // 2 + 2, generator=generator, dtype=torch.float64)
    gram, online = rows @ rows.mT, k // 2 + 1
    arguments = (online, None, torch.randn(online, generator=generator, dtype=torch.float64), *BOUNDS)
    wanted = call("common_descent", gram, *arguments)
    if call is not REFERENCE:  # its products are batched by a library
        alone = call("common_descent", gram[1:2], *arguments)
        assert all(torch.equal(one[0], many[1]) for one, many in zip(alone, wanted, strict=True))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, call("common_descent", gram, *arguments), wanted))


@every
def test_no_matrix_gives_no_direction(call):
    coeff, solved, fair = call("common_descent", torch.zeros(0, 4, 4, dtype=torch.float64), 2, None, None, *BOUNDS)
    assert (coeff.shape, solved.shape, fair.shape) == ((0, 4), (0,), (0,))


@every
def test_matrices_that_are_not_quite_symmetric_count_by_their_symmetric_part(call):
    scale = torch.ones(3, 5, dtype=torch.float64)
    found, wanted = (call("common_descent", gram, 4, scale, None, *BOUNDS)[0] for gram in not_quite_symmetric())
    assert torch.equal(found, wanted)
