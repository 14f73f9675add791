# SPDX-License-Identifier: Apache-2.0
"""Every guard against a direct reading of its paper."""

import itertools
import math

import numpy as np
import pytest
import torch
from algorithm_cohorts import COLUMNS, make_cohort, random_rows
from guard_cohorts import crowd

from fl_lightning import algorithms, guards

UNIFORM = algorithms.FedAvg("uniform")


def step(guard, cohort, rule=UNIFORM):
    return rule.aggregate(guard.guarded(cohort))


def paper_scores(rows, f):
    """Section 4: ``s(i) = sum over i -> j of ||V_i - V_j||^2``, the n - f - 2 closest vectors."""
    n, found = len(rows), []
    for i in range(n):
        squares = sorted(float((rows[i] - rows[j]).square().sum()) for j in range(n) if j != i)
        found.append(sum(squares[: n - f - 2]))
    return found


@pytest.mark.parametrize(("m", "f"), [(5, 1), (9, 2), (9, 3), (12, 0), (3, 0)])
def test_scores_and_choice_are_the_papers(m, f):
    cohort = crowd(m, seed=m)
    expected = paper_scores(cohort.updates.rows, f)
    order = sorted(range(m), key=expected.__getitem__)
    assert guards.Krum(f).judge(cohort).remaining(m) == [order[0]]
    assert guards.MultiKrum(f).judge(cohort).remaining(m) == sorted(order[: m - f])
    assert guards.MultiKrum(f, keep=2).judge(cohort).remaining(m) == sorted(order[:2])


def test_equal_scores_leave_the_lowest_id_in_any_order():
    assert guards.Krum(1).judge(make_cohort(torch.ones(6, 92))).remaining(6) == [0]
    assert guards.Krum(1).guarded(make_cohort(torch.ones(6, 92), ids=[5, 3, 4, 1, 2, 9])).client_ids == (1,)
    rows = random_rows(3, 0)  # one neighbour counts, so the two nearest rows have the same score
    expected = paper_scores(rows, 0)
    nearest = expected.index(min(expected))
    for order in itertools.permutations(range(3)):
        assert guards.Krum(0).guarded(make_cohort(rows[list(order)], ids=order)).client_ids == (nearest,)


def test_a_share_is_rounded_up():
    cohort = crowd(11)
    assert len(guards.MultiKrum(0.2).judge(cohort).left_out) == 3
    assert len(guards.MultiKrum(3).judge(cohort).left_out) == 3
    assert len(guards.MultiKrum(0.1).judge(crowd(10)).left_out) == 1


def test_what_clients_left_out_have_reported_is_gone():
    cohort = crowd(7)
    found = guards.MultiKrum(2).guarded(cohort)
    kept = list(found.client_ids)
    assert len(kept) == 5
    assert 3 not in kept  # the one far away
    assert torch.equal(found.updates.rows, cohort.updates.rows[kept])
    assert torch.equal(found.losses, cohort.losses[kept])
    assert torch.equal(found.sizes, cohort.sizes[kept])
    assert torch.equal(found.extras["accuracy"], cohort.extras["accuracy"][kept])
    assert torch.equal(found.companions["disparity"].rows, cohort.companions["disparity"].rows[kept])
    assert torch.equal(found.losses_at(cohort.params), 0.5 * cohort.losses[kept])


def test_too_few_clients():
    cohort = make_cohort(random_rows(6, 0))
    for guard, name in ((guards.Krum(2), r"Krum\(dishonest=2\)"), (guards.MultiKrum(1, keep=7), "MultiKrum.*keep=7")):
        with pytest.raises(guards.CannotGuardError, match=f"6 usable reports, fewer than the 7 that {name}.* needs"):
            guard.judge(cohort)
    for guard in (guards.Krum, guards.MultiKrum, guards.Bulyan, guards.TrimmedMean):
        words = f"dishonest of {guard.__name__} must be a count or a share below .5, found 0.6"
        with pytest.raises(ValueError, match=words):
            guard(0.6)


def test_long_rows_are_cut_and_short_ones_keep_their_bits():
    cohort = crowd()
    norms = cohort.updates.rows.norm(dim=1)
    bound = float(norms.sort().values[5])
    found = guards.NormClipping(bound).guarded(cohort)
    for before, after, norm in zip(cohort.updates.rows, found.updates.rows, norms, strict=True):
        if norm <= bound:
            assert torch.equal(before, after)
        else:
            torch.testing.assert_close(after, before * bound / norm)
    assert guards.NormClipping(bound).judge(cohort).scalars == {"clipped": 3.0}
    torch.testing.assert_close(found.updates.norms(), found.updates.rows.norm(dim=1))  # none are remembered


def test_the_adaptive_bound_follows_the_paper():
    guard, bound = guards.AdaptiveNormClipping(quantile=0.25, rate=0.5), None
    for seed in range(4):
        cohort = make_cohort(random_rows(7, seed) * (seed + 1))
        norms = cohort.updates.rows.norm(dim=1)
        if bound is None:
            bound = float(norms.sort().values[1])  # of 7, the lower of those around place 1.5
        assert guard.judge(cohort).scalars["bound"] == pytest.approx(bound)
        b = float((norms <= bound * (1 + 1e-12)).double().mean())
        bound *= math.exp(-0.5 * (b - 0.25))
        assert guard.bound == pytest.approx(bound)


def test_updates_of_zeros_do_not_take_the_others_away():
    rows, guard = torch.zeros(4, 92, dtype=torch.float64), guards.AdaptiveNormClipping()
    rows[0, 0], rows[1, 1] = 3.0, 5.0
    assert guard.guarded(make_cohort(rows)).updates.norms().tolist() == pytest.approx([3.0, 3.0, 0.0, 0.0])
    assert guard.bound == pytest.approx(3 * math.exp(-0.2 * (0.75 - 0.5)))  # zeros fit under it, too


def test_a_round_of_zeros_moves_no_bound():
    guard = guards.AdaptiveNormClipping()
    guard.judge(crowd())
    before = guard.bound
    guard.judge(make_cohort(torch.zeros(3, 92)))
    assert guard.bound == before > 0


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

    for rows_are in ("same", "own"):
        v = step(guards.GeometricMedian(iterations=2000, rows=rows_are), cohort, algorithms.FedAvg())
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
