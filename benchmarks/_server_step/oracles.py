# SPDX-License-Identifier: Apache-2.0
"""Other solvers of the min-norm QP, one matrix per call. They are for comparison only; each may be missing.

Everything that a solver lets prepare is prepared before: the clock sees the solution alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Solve = Callable[[], Floats]
RIDGE = 1e-9  # of the mean diagonal, for the solver that needs a positive definite matrix


@dataclass(frozen=True)
class Oracle:
    """One solver: ``prepare`` takes a Gram matrix and returns what solves it."""

    name: str
    prepare: Callable[[Floats], Solve]


def installed() -> tuple[list[Oracle], list[str]]:
    """The solvers at hand, and one sentence about each that is not."""
    found, missing = [], []
    for name, build in (("cvxopt", _cvxopt), ("quadprog", _quadprog), ("clarabel", _clarabel), ("proxsuite", _prox)):
        if importlib.util.find_spec(name) is None:
            missing.append(f"{name} is not installed, so nothing is compared with it (pip install {name}).")
        else:
            found.append(Oracle(name, build(importlib.import_module(name))))
    return found, missing


def _cvxopt(module: Any) -> Callable[[Floats], Solve]:
    solvers = importlib.import_module("cvxopt.solvers")
    options = {"show_progress": False}

    def prepare(gram: Floats) -> Solve:
        k = len(gram)
        scale = np.trace(gram) / k
        minus, ones = module.spmatrix(-1.0, range(k), range(k)), module.matrix(1.0, (1, k))
        zeros, one = module.matrix(0.0, (k, 1)), module.matrix(1.0)
        matrix = module.matrix(gram / scale)
        return lambda: np.array(solvers.qp(matrix, zeros, minus, zeros, ones, one, options=options)["x"])[:, 0]

    return prepare


def _quadprog(module: Any) -> Callable[[Floats], Solve]:
    def prepare(gram: Floats) -> Solve:
        k = len(gram)
        matrix = gram / (np.trace(gram) / k) + RIDGE * np.eye(k)
        linear, rules = np.zeros(k), np.concatenate([np.ones((k, 1)), np.eye(k)], 1)
        right = np.concatenate([[1.0], np.zeros(k)])
        return lambda: module.solve_qp(matrix, linear, rules, right, 1)[0]

    return prepare


def _clarabel(module: Any) -> Callable[[Floats], Solve]:
    sparse = importlib.import_module("scipy.sparse")

    def prepare(gram: Floats) -> Solve:
        k = len(gram)
        matrix = sparse.csc_matrix(np.triu(gram / (np.trace(gram) / k)))
        rules = sparse.csc_matrix(np.concatenate([np.ones((1, k)), -np.eye(k)]))
        right, linear = np.concatenate([[1.0], np.zeros(k)]), np.zeros(k)
        cones = [module.ZeroConeT(1), module.NonnegativeConeT(k)]
        settings = module.DefaultSettings()
        settings.verbose, settings.max_threads = False, 1
        return lambda: np.array(module.DefaultSolver(matrix, linear, rules, right, cones, settings).solve().x)

    return prepare


def _prox(module: Any) -> Callable[[Floats], Solve]:
    def prepare(gram: Floats) -> Solve:
        k = len(gram)
        matrix = gram / (np.trace(gram) / k)
        zeros, most, eye = np.zeros(k), np.full(k, 1e20), np.eye(k)

        def solve() -> Floats:
            problem = module.proxqp.dense.QP(k, 1, k)
            problem.settings.eps_abs, problem.settings.eps_rel = 1e-9, 0.0
            problem.init(matrix, zeros, np.ones((1, k)), np.ones(1), eye, zeros, most)
            problem.solve()
            return np.array(problem.results.x)

        return solve

    return prepare


def matrices(k: int, rank: int, batch: int, seed: int) -> Floats:
    """``[batch, k, k]`` Gram matrices of Gaussian rows of this rank."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((batch, k, rank)) @ rng.standard_normal((batch, rank, 3 * k))
    if rank >= k:
        rows = rng.standard_normal((batch, k, 3 * k))
    return rows @ rows.swapaxes(1, 2)


def relative_gap(gram: Floats, lam: Floats) -> float:
    """How far a point is from optimal, ``max_j (lam' G lam - (G lam)_j)`` in units of the mean diagonal.

    What a solver leaves outside of the simplex is cut off first.
    """
    inside = np.maximum(lam, 0.0)
    inside /= inside.sum()
    slope = gram @ inside
    return float(inside @ slope - slope.min()) / float(np.trace(gram) / len(gram))
