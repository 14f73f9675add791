# SPDX-License-Identifier: Apache-2.0
"""Krum and Multi-Krum, against a direct reading of the paper."""

import itertools

import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from guard_cohorts import crowd

from fl_lightning import guards


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
    with pytest.raises(
        guards.CannotGuardError, match=r"6 usable reports, fewer than the 7 that Krum\(dishonest=2\) needs"
    ):
        guards.Krum(2).judge(cohort)
    with pytest.raises(
        guards.CannotGuardError, match=r"6 usable reports, fewer than the 7 that MultiKrum\(dishonest=1, keep=7\) needs"
    ):
        guards.MultiKrum(1, keep=7).judge(cohort)
    for guard in (guards.Krum, guards.MultiKrum, guards.Bulyan, guards.TrimmedMean):
        words = f"dishonest of {guard.__name__} must be a count or a share below .5, found 0.6"
        with pytest.raises(ValueError, match=words):
            guard(0.6)
