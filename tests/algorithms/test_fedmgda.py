# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows

from fl_lightning.algorithms import FedMGDAPlus, Needs
from fl_lightning.core.layout import ParamLayout


def units(rows):
    return rows / rows.norm(dim=1, keepdim=True)


def test_epsilon_zero_is_the_mean_of_unit_updates_by_data():
    rows, sizes = random_rows(4, 61), torch.tensor([10.0, 20.0, 30.0, 40.0])
    step = FedMGDAPlus(epsilon=0.0).aggregate(make_cohort(rows, sizes=sizes, lr=0.5))
    torch.testing.assert_close(step, 0.5 * (sizes.double() / 100) @ units(rows))


def test_hand_worked():
    """Orthogonal updates of any length: the weights of unit vectors are equal unless the data forbids it."""
    rows = torch.zeros(2, 92, dtype=torch.float64)
    rows[0, 0], rows[1, 5] = 3.0, 0.01
    cohort = make_cohort(rows, sizes=[90, 10], lr=1.0)
    for epsilon, weights in ((0.0, (0.9, 0.1)), (0.1, (0.8, 0.2)), (0.3, (0.6, 0.4)), (0.5, (0.5, 0.5))):
        rule = FedMGDAPlus(epsilon)
        step = rule.aggregate(cohort)
        assert (step[0], step[5]) == pytest.approx(weights)
        torch.testing.assert_close(rule.report.weights @ rows, step)


def test_a_small_client_weighs_at_most_epsilon_more_than_its_share():
    """Orthogonal updates: free weights would be a third each, lower bounds alone would leave 0.3 for the small one."""
    rows = torch.eye(3, 92, dtype=torch.float64)
    step = FedMGDAPlus(epsilon=0.1).aggregate(make_cohort(rows, sizes=[10, 45, 45], lr=1.0))
    torch.testing.assert_close(step[:3], torch.tensor([0.2, 0.4, 0.4], dtype=torch.float64))


def test_step_size_is_the_learning_rate_of_the_round_or_a_number():
    rows = random_rows(3, 62)
    one, ten = (FedMGDAPlus().aggregate(make_cohort(rows, lr=lr)) for lr in (0.1, 1.0))
    torch.testing.assert_close(ten, 10 * one)
    fixed = FedMGDAPlus(server_lr=1.0)
    assert fixed.needs == Needs()
    torch.testing.assert_close(ten, fixed.aggregate(make_cohort(rows, lr=None)))
    torch.testing.assert_close(ten, fixed.aggregate(make_cohort(1e6 * rows, lr=None)))


def test_a_zero_update_changes_nothing_for_the_others():
    """The zero row may not weigh anything; the search for the other weights must not come back to it for ever."""
    rows = torch.tensor([[0.0, 0.0], [-2.0, -3.0], [-1.0, 2.0], [-3.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    layout = ParamLayout.from_sizes((2,))
    steps = [
        FedMGDAPlus(epsilon=0.3, server_lr=1.0).aggregate(make_cohort(part, sizes=torch.ones(len(part)), layout=layout))
        for part in (rows, rows[1:])
    ]
    torch.testing.assert_close(steps[0], steps[1])


def test_opposite_updates_give_no_step():
    row = random_rows(1, 65)
    rule = FedMGDAPlus(epsilon=1.0)
    assert not rule.aggregate(make_cohort(torch.cat([row, -3 * row]))).any()
    assert rule.report.flagged
    assert FedMGDAPlus(epsilon=0.1).aggregate(make_cohort(torch.cat([row, -3 * row]))).any()  # sizes 1 and 2
