# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys

import numpy as np
import pytest
import qp_cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.ops.solvers import box_min_norm, min_norm


def solve(gram, lower, upper):
    return box_min_norm(torch.from_numpy(gram), torch.from_numpy(lower), torch.from_numpy(upper)).numpy()


def boxes(rng, k):
    """Bounds around random shares, as FedMGDA+ has them, and bounds of any kind."""
    share = rng.dirichlet(np.ones(k))
    for epsilon in (0.0, 0.02, 0.3, 1.0):
        yield np.maximum(0, share - epsilon), np.minimum(1, share + epsilon)
    yield share - rng.random(k), share + rng.random(k) * (rng.random(k) < 0.7)


def excess(gram, lam, lower, upper, least):
    assert (lam >= lower).all()
    assert (lam <= upper).all()
    assert abs(lam.sum() - 1) <= 1e-11
    return (lam @ gram @ lam - least) / (np.trace(gram) / len(gram) or 1.0)


@pytest.mark.parametrize(("k", "batch"), [(2, 2), (3, 3), (5, 1)])
def test_objective_is_the_least_of_all_faces(k, batch):
    rng = np.random.default_rng(k)
    for name, grams in qp_cases.families(rng, batch, k).items():
        for gram, scale in zip(grams, (1e-12, 1.0, 1e12), strict=False):
            gram = scale * gram
            for lower, upper in boxes(rng, k):
                lam = solve(gram, lower, upper)
                best = qp_cases.enumerate_faces(gram, lower, upper)
                assert excess(gram, lam, lower, upper, best) <= 1e-9, name


@given(
    seed=st.integers(0, 2**32 - 1),
    movable=st.integers(3, 5),
    fixed=st.integers(1, 3),
    dimensions=st.integers(2, 5),
    pull=st.sampled_from([0.0, 0.3, 1.0]),
    room=st.sampled_from([0.1, 0.3, 0.6]),
)
@settings(max_examples=100, deadline=None)
def test_weights_whose_bounds_coincide_do_not_stop_the_search(seed, movable, fixed, dimensions, pull, room):
    """Unit rows, and some whose weight cannot move: short ones, so that the objective would like it to grow."""
    rng = np.random.default_rng(seed)
    rows, k = rng.standard_normal((movable + fixed, dimensions)), movable + fixed
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[movable:] *= pull
    held = rng.choice([0.0, 1 / k]) * np.ones(fixed)
    share = np.full(movable, (1 - held.sum()) / movable)
    lower, upper = np.concatenate([np.maximum(share - room, 0), held]), np.concatenate([share + room, held])
    order = rng.permutation(k)
    gram, lower, upper = qp_cases.gram_of(rows[order]), lower[order], upper[order]
    lam = solve(gram, lower, upper)
    assert excess(gram, lam, lower, upper, qp_cases.enumerate_faces(gram, lower, upper)) <= 1e-9


@pytest.mark.parametrize("k", [10, pytest.param(40, marks=pytest.mark.slow), pytest.param(80, marks=pytest.mark.slow)])
def test_objective_is_that_of_an_interior_point_solver(k):
    rng = np.random.default_rng(k)
    for name, grams in qp_cases.families(rng, 1, k).items():
        for lower, upper in boxes(rng, k):
            lam = solve(grams[0], lower, upper)
            best = qp_cases.independent(grams[0], lower, upper)
            assert excess(grams[0], lam, lower, upper, best) <= 1e-9, name


@pytest.mark.parametrize("k", [2, 7, 30])
def test_without_bounds_it_is_min_norm(k):
    rng = np.random.default_rng(k)
    for name, grams in qp_cases.families(rng, 2, k).items():
        for gram in grams:
            lam = solve(gram, np.zeros(k), np.ones(k))
            best = qp_cases.objective(gram, min_norm(torch.from_numpy(gram)).numpy())
            assert abs(excess(gram, lam, np.zeros(k), np.ones(k), best)) <= 1e-11, name


def test_hand_worked():
    """Two orthogonal rows of squared length 1 and 4: free weights 4/5 and 1/5, then a bound on the first."""
    gram = np.diag([1.0, 4.0])
    assert solve(gram[:1, :1], np.zeros(1), np.ones(1)) == 1
    np.testing.assert_allclose(solve(gram, np.zeros(2), np.ones(2)), [0.8, 0.2], atol=1e-14)
    np.testing.assert_allclose(solve(gram, np.zeros(2), np.array([0.6, 1.0])), [0.6, 0.4], atol=1e-14)
    np.testing.assert_allclose(solve(gram, np.array([0.0, 0.3]), np.ones(2)), [0.7, 0.3], atol=1e-14)


def test_weights_do_not_depend_on_the_scale():
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((6, 20))
    lower, upper = next(iter(list(boxes(rng, 6))[2:]))
    lam = solve(rows @ rows.T, lower, upper)
    for exponent in (-900, -40, 40, 900):
        np.testing.assert_array_equal(lam, solve(np.ldexp(rows @ rows.T, exponent), lower, upper))


def test_matrices_that_rounding_made_indefinite():
    """Products known to 1e-7: the weights are as good as the products."""
    rng = np.random.default_rng(6)
    for name, grams in qp_cases.families(rng, 2, 12).items():
        for gram in grams:
            norms = np.sqrt(np.diag(gram))
            noise = rng.uniform(-1e-7, 1e-7, gram.shape)
            lower, upper = list(boxes(rng, 12))[2]
            lam = solve(gram + (noise + noise.T) / 2 * np.outer(norms, norms), lower, upper)
            best = qp_cases.independent(gram, lower, upper)
            assert excess(gram, lam, lower, upper, best) <= 1e-6, name


@pytest.mark.slow
@pytest.mark.process
def test_bits_do_not_depend_on_the_number_of_threads():
    program = (
        "import torch; from fl_lightning.ops.solvers import box_min_norm; g = torch.Generator().manual_seed(0);"
        "rows = torch.randn(160, 300, generator=g, dtype=torch.float64); share = torch.full((160,), 1 / 160);"
        "gram = (rows[:, None] * rows).sum(2); lam = box_min_norm(gram, 0.5 * share, 1.5 * share);"
        "print(lam.numpy().tobytes().hex())"
    )
    found = []
    for threads in ("1", "4"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        command = [sys.executable, "-c", program]
        found.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("gram", "lower", "upper", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(2), torch.ones(2), "gram must have shape"),
        (torch.zeros(0, 0), torch.zeros(0), torch.ones(0), "gram must have shape"),
        (torch.eye(2), torch.zeros(3), torch.ones(2), r"lower must have shape \[2\], found \[3\]"),
        (torch.eye(2), torch.zeros(2), torch.ones(1), r"upper must have shape \[2\], found \[1\]"),
        (torch.eye(2) * float("nan"), torch.zeros(2), torch.ones(2), "gram must be finite"),
        (torch.eye(2), torch.zeros(2), torch.tensor([1.0, float("inf")]), "upper must be finite"),
        (torch.eye(2), torch.full((2,), 0.6), torch.ones(2), "found lower sums to 1.2"),
        (torch.eye(2), torch.zeros(2), torch.full((2,), 0.4), "upper to 0.8"),
        (torch.eye(2), torch.tensor([0.0, 0.5]), torch.tensor([1.0, 0.4]), "1 entries of lower above upper"),
    ],
)
def test_bad_input(gram, lower, upper, words):
    with pytest.raises(ValueError, match=words):
        box_min_norm(gram, lower, upper)
