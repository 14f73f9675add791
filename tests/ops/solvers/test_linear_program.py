# SPDX-License-Identifier: Apache-2.0
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from fl_lightning.ops.solvers import linear_program


def solve(*parts, **more):
    return linear_program(*(torch.as_tensor(part, dtype=torch.float64) for part in parts), **more)


def highs(c, a, b, w):
    return linprog(-c, A_ub=a if len(a) else None, b_ub=b if len(a) else None, A_eq=w[None], b_eq=[1.0])


def by_vertices(c, a, b, w):
    """The best value over all vertices; ``None`` if there is none."""
    k, values = len(c), []
    walls, limits = np.vstack([a, -np.eye(k)]), np.concatenate([b, np.zeros(k)])
    for chosen in combinations(range(len(walls)), k - 1):
        system = np.vstack([w, walls[list(chosen)]])
        if abs(np.linalg.det(system)) > 1e-9:
            x = np.linalg.solve(system, np.concatenate([[1.0], limits[list(chosen)]]))
            if (walls @ x <= limits + 1e-10).all():
                values.append(c @ x)
    return max(values, default=None)


def random_program(rng, whole):
    k, q = int(rng.integers(1, 6)), int(rng.integers(0, 6))
    a, b, c, w = rng.normal(size=(q, k)), 0.5 * rng.normal(size=q) + 0.2, rng.normal(size=k), rng.uniform(0.1, 3, k)
    return (np.round(c), np.round(a), np.round(b), np.ones(k)) if whole else (c, a, b, w)


@pytest.mark.parametrize("whole", [False, True], ids=["random", "whole numbers"])
def test_equals_enumeration_and_an_independent_solver(whole):
    rng, solved = np.random.default_rng(0), 0
    for _ in range(300):
        c, a, b, w = random_program(rng, whole)
        found, expected, other = solve(c, a, b, w), by_vertices(c, a, b, w), highs(c, a, b, w)
        if expected is None:
            assert found.status == "infeasible"
            assert other.status == 2
            assert not found.x.any()
            continue
        solved += 1
        x = found.x.numpy()
        assert found.status == "optimal"
        assert found.value == pytest.approx(expected, abs=1e-12)
        assert found.value == pytest.approx(-other.fun, abs=1e-7)
        assert (x >= 0).all()
        assert (a @ x <= b + 1e-12).all()
        assert w @ x == pytest.approx(1, abs=1e-14)
    assert 100 < solved < 300


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6, 1e12])
@pytest.mark.parametrize("kind", ["random", "norms spread", "zero row", "duplicates"])
def test_directions_of_fcfl_are_optimal_at_any_scale(kind, scale):
    """``max c' K m`` where ``K c >= 0`` on the simplex: for a Gram matrix there always is a solution."""
    rng = np.random.default_rng(3)
    for k in (1, 2, 3, 7, 12, 30):
        rows = rng.normal(size=(k, 2 * k + 1)) + 0.2
        if kind == "norms spread":
            rows *= 10.0 ** rng.uniform(-4, 4, size=(k, 1))
        elif kind == "zero row":
            rows[k // 2] = 0
        elif kind == "duplicates":
            rows = rows[np.arange(k) // 2]
        gram = rows @ rows.T * scale
        objective, size = gram.mean(1), np.abs(gram).max() or 1.0
        found = solve(objective, -gram, np.zeros(k))
        assert found.status == "optimal"
        lengths = np.abs(gram).max(1, keepdims=True)
        lengths[lengths == 0] = 1
        options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
        ones = np.ones((1, k))
        other = linprog(
            -objective / size, A_ub=-gram / lengths, b_ub=np.zeros(k), A_eq=ones, b_eq=[1.0], options=options
        )
        assert found.value / size == pytest.approx(-other.fun, abs=1e-8)
        x = found.x.numpy()
        assert (gram @ x >= -1e-9 * (np.abs(gram) @ x)).all()
        again = solve(7 * objective, -3 * gram, np.zeros(k))
        torch.testing.assert_close(again.x, found.x, rtol=1e-9, atol=1e-12)


def test_a_hundred_clients():
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(100, 300)) + 0.05
    gram = rows @ rows.T
    objective = gram @ rng.uniform(0.5, 1.5, 100)
    other = highs(objective, -gram, np.zeros(100), np.ones(100))
    assert solve(objective, -gram, np.zeros(100)).value == pytest.approx(-other.fun, rel=1e-9)


def test_without_constraints_the_best_corner_wins():
    found = solve([1.0, 3.0, 2.0], np.zeros((0, 3)), np.zeros(0))
    assert found.x.tolist() == [0, 1, 0]
    assert found.value == 3
    found = solve([1.0, 3.0, 2.0], np.zeros((0, 3)), np.zeros(0), [1.0, 4.0, 2.0])
    assert found.value == 1, "corners lie at 1 / weight; the first of equals is taken"
    assert found.x.tolist() == [1, 0, 0]


def test_coefficients_at_the_edge_of_the_number_range_do_no_harm():
    found = solve([1.0, 2.0], [[1.0, -1.0], [-1e-310, 1e-315]], [0.0, 0.0])
    assert found.status == "optimal"
    assert found.value == 2


def test_the_limit_on_pivots_is_kept():
    a = -np.array([[1.0, -1.0], [-0.5, 1.0]])
    assert solve([1.0, -2.0], a, np.zeros(2)).status == "optimal"
    stalled = solve([-1.0, 2.0], a, np.zeros(2), max_pivots=0)
    assert stalled.status == "stalled"
    assert not stalled.x.any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], np.zeros((0, 0)), []), "objective must have shape"),
        (([[1.0]], np.zeros((0, 1)), []), "objective must have shape"),
        (([1.0], [[1.0, 2.0]], [1.0]), r"matrix must have shape \[1, 1\], found \[1, 2\]"),
        (([1.0], [[1.0]], [1.0, 2.0]), r"bounds must have shape \[1\], found \[2\]"),
        (([1.0], [[1.0]], [1.0], [1.0, 1.0]), r"weights must have shape \[1\]"),
        (([1.0], [[np.nan]], [1.0]), "matrix must be finite"),
        (([np.inf], [[1.0]], [1.0]), "objective must be finite"),
        (([1.0, 1.0], [[1.0, 1.0]], [1.0], [1.0, 0.0]), r"weights must be positive, found \[1.0, 0.0\]"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        solve(*arguments)
