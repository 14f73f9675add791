# SPDX-License-Identifier: Apache-2.0
"""Norm clipping, with a fixed bound and with one that follows the norms."""

import math

import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from guard_cohorts import crowd

from fl_lightning import guards


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
