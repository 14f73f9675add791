# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows, switched

from fl_lightning.algorithms import FedMDFG


def test_worse_than_before_activates_the_fair_row():
    rows = random_rows(3, 47)
    for force_all, second, expected in (
        (True, [1.2, 1.0, 1.0], 1),
        (True, [1.3, 1.2, 1.1], 1),
        (False, [1.3, 1.2, 1.1], 0),
        (False, [1.2, 1.0, 1.0], 1),
        (True, [0.9, 1.0, 0.95], 0),
    ):
        rule = FedMDFG(reading="library" if force_all else "code")
        rule.aggregate(make_cohort(rows, [1.0, 1.0, 1.0]))
        rule.aggregate(make_cohort(rows, second, when=1))
        assert rule.report.scalars["fair_row"] == expected


def test_line_search_second_and_third_stage():
    """Never falling enough for everybody: the largest step that lowers the sum, else the one with the least sum."""
    rows, losses = random_rows(2, 53), torch.tensor([1.0, 1.0])

    def search(sums):
        asked = iter(sums)
        rule = FedMDFG(s=1)
        rule.aggregate(make_cohort(rows, losses, losses_at=lambda p: torch.tensor([1.5, next(asked) - 1.5])))
        return rule.report.scalars

    found = search([3.0, 1.8, 1.7, 1.9, 1.6])
    assert (found["step_length"], found["evaluations"], found["fair_row"], found["history_rows"]) == (1, 3, 0, 0)
    assert search([3.0, 2.5, 2.1, 9.0, 9.0])["step_length"] == 0.5
    assert search([math.nan, math.inf, 2.1, 9.0, 9.0])["step_length"] == 0.5


@pytest.mark.parametrize("s", [0, 2])
def test_the_last_trial_is_made_whatever_the_rounding(s):
    """Rows whose mean is the direction: sigma is 1 up to rounding, so lengths from ``2^s`` to ``2^-s`` are tried."""
    for seed in range(60):
        draw = torch.Generator().manual_seed(seed)
        basis = torch.linalg.qr(torch.randn(92, 4, generator=draw, dtype=torch.float64))[0].T
        rule, losses = FedMDFG(s=s), torch.ones(3)
        rows = 0.7 * basis[3] + torch.rand((), generator=draw) * basis[:3]
        rule.aggregate(make_cohort(rows, losses, losses_at=lambda params, losses=losses: losses + 1))
        assert rule.report.scalars.get("evaluations") == 2 * s + 1


def test_line_search_without_finite_losses_stays():
    rule = FedMDFG()
    rows = random_rows(2, 54)
    assert not rule.aggregate(make_cohort(rows, losses_at=lambda p: torch.full((2,), math.nan))).any()
    assert rule.report.flagged
    with pytest.raises(ValueError, match="losses_at"):
        rule.aggregate(make_cohort(rows, losses_at=lambda p: torch.ones(3)))


def test_learning_rate_of_zero_stays():
    """The first round of a warm-up; the slope per unit of loss is undefined, whatever the rows say."""
    for rows in (torch.zeros(2, 92), random_rows(2, 56)):
        assert not FedMDFG().aggregate(make_cohort(rows, lr=0.0)).any()


def test_line_search_switches():
    rows, losses = random_rows(2, 55), torch.tensor([1.0, 3.0])  # not fair: the angle must shrink
    same = lambda p: losses  # noqa: E731  the losses neither fall nor become more equal
    less_fair = lambda p: losses * torch.tensor([0.1, 0.9])  # noqa: E731

    def trials(asked, **switches):
        rule = switched(FedMDFG(s=2), **switches)
        rule.aggregate(make_cohort(rows, losses, losses_at=asked))
        return rule.report.scalars["evaluations"]

    assert trials(less_fair) > 1
    assert trials(less_fair, skips_angle_test=True) == 1
    assert trials(same, skips_angle_test=True) > 1
    assert trials(same, skips_angle_test=True, losses_may_rise=True) == 1
