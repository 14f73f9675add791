# SPDX-License-Identifier: Apache-2.0
"""Every implementation of ``min_norm``: enumeration, relabelled rows, every size, extreme scales, batches, threads."""

import numpy as np
import pytest
import torch
from implementations import REFERENCE, compiled, every
from qp_cases import enumerate_supports, families, gram_of, objective, relative_gap

KINDS = tuple(families(np.random.default_rng(0), 1, 5))


def solved(call, gram):
    """Checks what holds for every matrix, and returns the points."""
    lam, gap = call("min_norm", torch.from_numpy(np.ascontiguousarray(gram)))
    lam, gap = lam.numpy(), gap.numpy()
    assert (lam >= 0).all()
    assert np.abs(lam.sum(-1) - 1).max() <= 1e-12
    found = np.maximum(relative_gap(gram, lam), 0)
    assert found.max() <= 1e-10
    np.testing.assert_allclose(gap, found, atol=1e-13)
    return lam


def means(gram):
    return np.einsum("...ii->...", gram) / gram.shape[-1]


@every
@pytest.mark.parametrize("kind", KINDS)
def test_objective_equals_that_of_the_best_support(call, kind):
    for k, batch in ((3, 4), (5, 3), (7, 2)):
        gram = families(np.random.default_rng(k), batch, k)[kind]
        for matrix, point in zip(gram, solved(call, gram), strict=True):
            assert abs(objective(matrix, point) - enumerate_supports(matrix)) <= 1e-9 * means(matrix)


@every
@pytest.mark.parametrize("kind", ["independent", "norms spread, low rank", "near duplicates 1e-10", "opposed"])
def test_objective_equals_that_of_the_best_support_of_ten(call, kind):
    gram = families(np.random.default_rng(10), 1, 10)[kind]
    assert abs(objective(gram, solved(call, gram)) - enumerate_supports(gram[0])) <= 1e-9 * means(gram)


@every
@pytest.mark.parametrize("kind", KINDS)
def test_relabelled_rows_give_the_same_point(call, kind):
    """The point is unique, and so are the weights of affinely independent rows."""
    rng = np.random.default_rng(3)
    gram = families(rng, 3, 26)[kind]
    lam = solved(call, gram)
    for _ in range(3):
        order = rng.permutation(26)
        again = np.empty_like(lam)
        again[:, order] = solved(call, gram[:, order][:, :, order])
        change = lam - again
        assert (objective(gram, change) <= 1e-10 * means(gram)).all()
        if kind in ("independent", "shared direction", "orthonormal", "opposed"):
            np.testing.assert_allclose(again, lam, atol=1e-11)


@every
def test_one_and_two_rows(call):
    assert [x.tolist() for x in call("min_norm", torch.tensor([[[4.0]], [[0.0]]]).double())] == [[[1], [1]], [0, 0]]
    answers = {
        (1, 0, 1): (0.5, 0.5), (1, 0, 3): (0.75, 0.25), (1, 2, 5): (1, 0), (5, 2, 1): (0, 1), (2, 2, 2): (0.5, 0.5),
        (0, 0, 0): (0.5, 0.5), (0, 0, 7): (1, 0), (1, -2, 4): (2 / 3, 1 / 3),
    }  # fmt: skip
    gram, want = (torch.tensor(list(numbers), dtype=torch.float64) for numbers in (answers, answers.values()))
    lam, gap = call("min_norm", gram[:, [0, 1, 1, 2]].view(-1, 2, 2))
    torch.testing.assert_close(lam, want, rtol=0, atol=1e-15)
    assert (gap <= 1e-15).all()


@every
def test_ties_fall_to_the_lowest_index(call):
    one, rows = torch.ones(4, 4, dtype=torch.float64), torch.tensor([[1.0, 1], [1, -1], [1, -1], [1, 1]]).double()
    lam, _ = call("min_norm", torch.stack([one, 0 * one, rows @ rows.T]))
    assert lam.tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0.5, 0.5, 0, 0]]


@every
def test_a_zero_row_is_optimal(call):
    rows = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[2] = rows[4] = 0
    assert call("min_norm", (rows @ rows.T)[None])[0].tolist() == [[0, 0, 1, 0, 0, 0]]


@every
@pytest.mark.parametrize("low", [1, 12, 24])
def test_every_number_of_rows(call, low):
    """Vectors of any width have a remainder at some of these."""
    for k in range(low, low + 12):
        rows = np.random.default_rng(k).standard_normal((2, k, k // 2 + 1))
        gram = gram_of(rows)
        lam = solved(call, gram)
        want = REFERENCE("min_norm", torch.from_numpy(gram))[0].numpy()
        assert (np.abs(objective(gram, lam) - objective(gram, want)) <= 1e-12 * means(gram)).all()


@compiled
@pytest.mark.parametrize(("k", "kind"), [(101, kind) for kind in KINDS[::3]] + [(320, "opposed"), (512, "independent")])
def test_many_rows(call, k, kind):
    solved(call, families(np.random.default_rng(k), 1, k)[kind])


@every
def test_the_largest_and_smallest_scales(call):
    gram = np.concatenate(list(families(np.random.default_rng(2), 1, 6).values()))
    lam, gap = call("min_norm", torch.from_numpy(gram))
    for exponent in (-900, -30, 30, 900):
        scaled = call("min_norm", torch.from_numpy(np.ldexp(gram, exponent)))
        some = np.diagonal(gram, axis1=1, axis2=2).max(1) > 1e-3  # the others lose digits to the smallest exponent
        assert torch.equal(scaled[0][some], lam[some])
        assert torch.equal(scaled[1][some], gap[some])


@every
def test_only_the_symmetric_part_counts(call):
    rng = np.random.default_rng(4)
    gram = gram_of(rng.integers(-3, 4, (5, 19, 30)).astype(float))
    skew = rng.integers(-9, 10, gram.shape).astype(float)
    skew = skew - skew.swapaxes(1, 2)
    want = call("min_norm", torch.from_numpy(gram))
    assert all(map(torch.equal, call("min_norm", torch.from_numpy(gram + skew)), want))


@every
@pytest.mark.parametrize("k", [2, 9, 41])
def test_a_matrix_gives_the_same_bits_alone_in_any_batch_and_with_more_threads(call, k):
    kinds = families(np.random.default_rng(k), 1, max(k, 3)).values()
    gram = torch.from_numpy(np.concatenate([matrices[:, :k, :k] for matrices in kinds]))
    gram = gram.repeat(1 + 9000 // k**2, 1, 1)  # some milliseconds: enough for several threads
    lam, gap = call("min_norm", gram)
    some = range(0, len(kinds), 1 if k < 41 else 5)
    assert all(torch.equal(call("min_norm", gram[i : i + 1])[0][0], lam[i]) for i in some)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        again = call("min_norm", gram.flip(0))
        assert torch.equal(again[0].flip(0), lam)
        assert torch.equal(again[1].flip(0), gap)


@every
def test_matrices_that_are_not_finite_are_marked_wherever_it_stands(call):
    for k in (1, 2, 3, 10, 17):
        gram = torch.eye(k, dtype=torch.float64).repeat(3 * k * k, 1, 1)
        for i in range(k * k):
            for j, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
                gram[3 * i + j].view(-1)[i] = bad
        lam, gap = call("min_norm", gram)
        assert lam.isnan().all()
        assert gap.isnan().all()


@every
def test_indefinite_matrices_end_on_the_simplex_with_a_small_gap(call):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40, 16, 3)) @ rng.standard_normal((40, 3, 48))
    rounded = gram_of(rows.astype(np.float32)).astype(np.float64)  # eigenvalues of about -1e-7
    lam, gap = call("min_norm", torch.from_numpy(rounded))
    assert (gap <= 1e-6).all()
    noise = rng.standard_normal((100, 9, 9))
    for gram in (noise + noise.swapaxes(1, 2), noise * 10.0 ** rng.uniform(-200, 150, (100, 9, 9))):
        lam, gap = call("min_norm", torch.from_numpy(gram))
        assert (lam >= 0).all()
        assert ((lam.sum(1) - 1).abs() <= 1e-12).all()
        assert not gap.isnan().any()
