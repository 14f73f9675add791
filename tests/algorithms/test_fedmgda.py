# SPDX-License-Identifier: Apache-2.0
import torch
from algorithm_cohorts import make_cohort, random_rows

from fl_lightning.algorithms import FedMGDAPlus, Needs
from fl_lightning.core.layout import ParamLayout


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
