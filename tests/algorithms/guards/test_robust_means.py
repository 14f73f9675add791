# SPDX-License-Identifier: Apache-2.0
"""Median, trimmed mean, Bulyan, geometric median, centred clipping and cosine trust, each against its paper."""

import numpy as np
import pytest
import torch
from algorithm_cohorts import COLUMNS, make_cohort, random_rows
from guard_cohorts import crowd
from test_krum import paper_scores

from fl_lightning import algorithms, guards

UNIFORM = algorithms.FedAvg("uniform")


def step(guard, cohort, rule=UNIFORM):
    return rule.aggregate(guard.guarded(cohort))


@pytest.mark.parametrize("m", [1, 2, 7, 8])
def test_the_median_is_the_step_of_every_mean(m):
    cohort = crowd(m, seed=m)
    expected = torch.from_numpy(np.median(cohort.updates.rows.numpy(), axis=0))
    torch.testing.assert_close(step(guards.CoordinateMedian(), cohort), expected)
    torch.testing.assert_close(step(guards.CoordinateMedian(), cohort, algorithms.FedAvg()), expected)
    torch.testing.assert_close(step(guards.CoordinateMedian(), cohort, algorithms.FedLF()), expected)


@pytest.mark.parametrize("b", [0, 1, 3])
def test_the_trimmed_mean(b):
    rows = crowd(9).updates.rows.numpy()
    expected = torch.from_numpy(np.sort(rows, 0)[b : 9 - b].mean(0))
    torch.testing.assert_close(step(guards.TrimmedMean(b), crowd(9)), expected)
    own = guards.TrimmedMean(b, rows="own").guarded(crowd(9)).updates.rows.numpy()
    low, high = np.sort(rows, 0)[[b, 8 - b]]
    np.testing.assert_array_equal(own, np.clip(rows, low, high))


def paper_choice(rows, f):
    """Section 4: theta = n - 2 f times Krum's choice among those left."""
    left, chosen = list(range(len(rows))), []
    while len(chosen) < len(rows) - 2 * f:
        among = rows[left]
        if len(left) - f - 2 >= 1:
            scores = paper_scores(among, f)
        else:  # the paper is silent: one neighbour counts
            scores = [
                min((float((a - b).square().sum()) for j, b in enumerate(among) if j != i), default=0.0)
                for i, a in enumerate(among)
            ]
        chosen.append(left.pop(int(np.argmin(scores))))
    return chosen


def paper_bulyan(rows, f):
    """Section 4: the chosen rows, then the mean of the theta - 2 f values nearest to their median."""
    chosen = paper_choice(rows, f)
    picked, beta = rows[chosen].numpy(), len(rows) - 4 * f
    result = np.empty(rows.shape[1])
    for column in range(rows.shape[1]):
        values = sorted(picked[:, column])
        near = sorted(values, key=lambda value: abs(value - np.median(values)))[:beta]
        result[column] = np.mean(near)
    return sorted(chosen), torch.from_numpy(result)


@pytest.mark.parametrize(("m", "f"), [(7, 1), (8, 1), (11, 2), (12, 2), (5, 0)])
def test_bulyan(m, f):
    cohort = crowd(m, seed=m)
    chosen, expected = paper_bulyan(cohort.updates.rows, f)
    found = guards.Bulyan(f).guarded(cohort)
    assert list(found.client_ids) == chosen
    torch.testing.assert_close(UNIFORM.aggregate(found), expected)
    own = guards.Bulyan(f, rows="own").guarded(cohort)
    assert list(own.client_ids) == chosen
    moved = own.updates.rows != cohort.updates.rows[chosen]
    assert (moved.sum(0) <= 2 * f).all()
    assert bool(moved.any()) == (f > 0)


def test_the_geometric_median_minimises_weighted_distances():
    cohort = crowd(8)
    rows, alpha = cohort.updates.rows, cohort.sizes / cohort.sizes.sum()

    def total(v):
        return float((alpha * (rows - v).norm(dim=1)).sum())

    for rule, rows_are in ((algorithms.FedAvg(), "same"), (algorithms.FedAvg(), "own")):
        v = step(guards.GeometricMedian(iterations=2000, rows=rows_are), cohort, rule)
        nudges = torch.randn(200, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert all(total(v) <= total(v + 1e-3 * nudge) for nudge in nudges)
        assert total(v) < total(alpha @ rows)


def test_three_steps_of_weiszfeld():
    """Algorithm 2 on vectors."""
    cohort = crowd(6)
    rows, alpha = cohort.updates.rows, torch.full((6,), 1 / 6, dtype=torch.float64)
    v = alpha @ rows
    for _ in range(3):
        beta = alpha / (rows - v).norm(dim=1).clamp_min(0.1)
        v = (beta[:, None] * rows).sum(0) / beta.sum()
    guard = guards.GeometricMedian("uniform", smoothing=0.1, iterations=3)
    torch.testing.assert_close(step(guard, cohort), v)
    least = float(beta.min() / beta.sum() / alpha[0])  # of the last step, over the weight in the mean
    assert guard.judge(cohort).scalars["smallest_weight"] == pytest.approx(least)


@pytest.mark.parametrize("iterations", [1, 3])
def test_centred_clipping_over_rounds(iterations):
    """Equation 5 on vectors: v <- v + mean of (x_i - v) min(1, tau / ||x_i - v||)."""
    guard, tau, v = guards.CentredClipping(4.0, iterations), 4.0, torch.zeros(COLUMNS, dtype=torch.float64)
    for seed in range(4):
        cohort = crowd(7, seed)
        for _ in range(iterations):
            apart = cohort.updates.rows - v
            v = v + (apart * (tau / apart.norm(dim=1)).clamp_max(1)[:, None]).mean(0)
        torch.testing.assert_close(step(guard, cohort), v)
        torch.testing.assert_close(guard.center, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("factor", [1e4, 3e7, 1e12, 1e30])
def test_a_row_far_beyond_the_radius_goes_to_the_edge_of_the_ball(dtype, factor):
    guard = guards.CentredClipping(4.0)
    guard.judge(crowd(7))
    cohort = crowd(7, 1, dtype)
    cohort.updates.rows[3] *= factor
    v, found = guard.center, guard.guarded(cohort).updates.rows.double()
    apart = cohort.updates.rows.double() - v
    torch.testing.assert_close(found - v, apart * (4.0 / apart.norm(dim=1)).clamp_max(1)[:, None], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.mean(0), guard.center.double(), rtol=1e-5, atol=1e-5)  # what the guard remembers


@pytest.mark.parametrize("rows", ["same", "own"])
def test_cosine_trust(rows):
    """Algorithm 2 of FLTrust on vectors."""
    cohort = crowd(9, seed=4)
    g = cohort.updates.rows
    cosines = torch.nn.functional.cosine_similarity(g, g[2][None])
    trust = cosines.clamp_min(0)
    trust[2] = 0
    expected = sum(t * g[2].norm() / x.norm() * x for t, x in zip(trust, g, strict=True)) / trust.sum()
    guard = guards.CosineTrust(2, rows=rows)
    found = guard.guarded(cohort)
    assert set(found.client_ids) == {client for client in range(9) if trust[client] > 0}
    assert 0 < len(found) < 8
    torch.testing.assert_close(UNIFORM.aggregate(found), expected)


def test_cosine_trust_without_anybody_to_trust():
    rows = random_rows(4, 0)
    with pytest.raises(guards.CannotGuardError, match="no report of client 9"):
        guards.CosineTrust(9).judge(make_cohort(rows))
    opposed = torch.stack([rows[0], -rows[0], -2 * rows[0], torch.zeros(COLUMNS, dtype=torch.float64)])
    with pytest.raises(guards.CannotGuardError, match="no update that agrees with that of client 0"):
        guards.CosineTrust(0).judge(make_cohort(opposed))
    with pytest.raises(guards.CannotGuardError, match="an update of zeros from client 3"):
        guards.CosineTrust(3).judge(make_cohort(opposed))
