# SPDX-License-Identifier: Apache-2.0
"""Where a number is compared with a bound: on both sides of it, and on it."""

import math

import pytest
import torch
import vector_forms
from algorithm_cohorts import make_cohort, random_rows, switched

from fl_lightning.algorithms import FCFL, FedFV, FedLF, FedMDFG
from fl_lightning.algorithms._shared.rows import fair_weights
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
    step = FedFV(alpha=0.0, tau=0).aggregate(make_cohort(rows, torch.ones(3), layout=ParamLayout.from_sizes((3,))))
    expected = vector_forms.FedFV(0.0, 0).step(rows.numpy(), [1.0] * 3, range(3), 0)
    torch.testing.assert_close(step, torch.from_numpy(expected))


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
