# SPDX-License-Identifier: Apache-2.0
"""Where a number is compared with a bound: on both sides of it, and on it."""

import math

import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows, switched

from fl_lightning.algorithms import FCFL, FedFV, FedLF, FedMDFG
from fl_lightning.algorithms._shared.common_descent import fair_weights
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.updates import UpdateMatrix


@pytest.mark.parametrize("m", [2, 9])
def test_losses_count_as_equal_by_their_angle(m):
    """1e-6 radians, whatever the number of clients: the root of ``m`` belongs to it."""
    for angle, apart in ((0.9e-6, False), (1.1e-6, True)):
        away = torch.zeros(m, dtype=torch.float64)
        away[0], away[1] = 1, -1
        losses = torch.ones(m, dtype=torch.float64) + away / away.norm() * math.tan(angle) * math.sqrt(m)
        assert (fair_weights(losses) is not None) == apart


def test_layers_are_as_long_as_the_mean_of_the_rows_that_count():
    """FedLF: a client without an update in a layer does not shorten the others' rows there."""
    rows = torch.zeros(3, 4, dtype=torch.float64)
    rows[0, 0], rows[1, 1] = 1.0, 3.0  # first layer: the third client has none
    rows[:, 2] = 2.0  # second layer
    layout = ParamLayout.from_sizes((2, 2))
    step = FedLF().aggregate(make_cohort(rows, torch.ones(3), layout=layout))
    direction = torch.tensor([1.0, 1.0, 2.0, 0.0], dtype=torch.float64)  # 2 (1/2, 1/2), and 2 along the third column
    expected = direction / direction.norm() * rows.mean(0).norm()
    torch.testing.assert_close(step, expected)


@pytest.mark.parametrize(("size", "counts"), [(0.0, False), (1e-5, False), (1e-3, True)])
def test_a_fair_row_counts_from_a_share_of_the_other_rows_on(size, counts):
    """FedLF: rows that the fair weights (-1, -1, 1) all but cancel leave no row to stretch to the others' length."""
    rows = torch.tensor([[1.0, -1, 0, 0], [0, 1, -1, 0], [1, 0, -1, size]], dtype=torch.float64)
    rule = FedLF()
    step = rule.aggregate(make_cohort(rows, [1.0, 1.0, 2.0], layout=ParamLayout.from_sizes((4,))))
    assert not rule.report.flagged
    assert (float(step[3]) > 0.1) == counts
    if not counts:
        torch.testing.assert_close(step, torch.tensor([2 / 3, 0, -2 / 3, 0], dtype=torch.float64), atol=1e-5, rtol=0)


def test_fedfv_projects_ties_in_the_order_of_arrival():
    """Equal losses: of three conflicting rows the first is projected on first."""
    rows = torch.tensor([[1.0, 0.0, 0.0], [-0.6, 0.8, 0.0], [-0.5, -0.7, 0.5]], dtype=torch.float64)
    layout, losses = ParamLayout.from_sizes((3,)), torch.ones(3)
    projected = []
    for i in range(3):
        p = rows[i].clone()
        for j in range(3):
            if j != i and p @ rows[j] < 0:
                p -= p @ rows[j] / (rows[j] @ rows[j]) * rows[j]
        projected.append(p)
    mean = torch.stack(projected).mean(0)
    step = FedFV(alpha=0.0, tau=0).aggregate(make_cohort(rows, losses, layout=layout))
    torch.testing.assert_close(step, mean / mean.norm() * rows.mean(0).norm())


def test_armijos_slope_is_that_of_the_rescaled_rows():
    """A client with a long gradient: its loss must fall by ``beta`` times the slope of the row of mean length."""
    rows = torch.tensor([[8.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    lr, layout, losses = 0.5, ParamLayout.from_sizes((2,)), torch.ones(2, dtype=torch.float64)
    units = torch.eye(2, dtype=torch.float64) * 5.0  # mean length
    direction = units.mean(0)
    slopes = units @ direction / lr  # per learning rate, in units of the loss
    for share, trials in ((1.01, 1), (0.99, 2)):

        def after(params, share=share):
            length = float(params.norm() / direction.norm())
            return losses - share * 0.3 * length * slopes if length > 0.9 else losses - 10 * length * slopes

        rule = FedMDFG(s=0, beta=0.3)
        rule.aggregate(make_cohort(rows, losses, layout=layout, lr=lr, losses_at=after))
        assert rule.report.scalars["evaluations"] == min(trials, 1)
        rule = FedMDFG(s=1, beta=0.3)
        rule.aggregate(make_cohort(rows, losses, layout=layout, lr=lr, losses_at=after))
        assert rule.report.scalars["step_length"] == (2.0 if trials == 1 else 0.5)


def test_losses_below_zero_are_no_losses_of_zero():
    rule = switched(FedMDFG(), drops_zero_losses=True)
    rows = random_rows(3, 3)
    losses = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    rule.aggregate(make_cohort(rows, losses, losses_at=lambda params: losses - 1))
    assert [bool(weight) for weight in rule.report.weights] == [True, False, True]


def test_a_budget_that_is_just_met_bounds_the_second_stage_of_the_code():
    """``reading="code"`` keeps the bound while a budget is exceeded or just met."""
    layout = ParamLayout.from_sizes((2,))
    u = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    v = torch.tensor([[-1.0, 1.0]], dtype=torch.float64)  # down the loss is up the disparity
    for gap, bound in ((0.125, True), (0.125 - 1e-6, False)):
        rule = FCFL(0.125, stage1_rounds=0, reading="code")
        extras, companions = (
            {"disparity": torch.tensor([gap], dtype=torch.float64)},
            {"disparity": UpdateMatrix(v, layout)},
        )
        step = rule.aggregate(make_cohort(u, [1.0], layout=layout, extras=extras, companions=companions))
        assert (float(v[0] @ step) >= -1e-12) == bound
