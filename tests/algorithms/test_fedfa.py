# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows

from fl_lightning.algorithms import FedFa


def weigh(accuracies, beta=0.5, ids=None, rule=None):
    rule = FedFa(beta) if rule is None else rule
    rows = random_rows(len(accuracies), 1)
    rule.aggregate(make_cohort(rows, ids=ids, extras={"accuracy": torch.tensor(accuracies, dtype=torch.float64)}))
    return rule.report.weights


def test_nobody_is_right_or_one_alone():
    rule = FedFa(0.0)
    assert weigh([0.0, 0.0, 0.0], rule=rule).tolist() == pytest.approx([1 / 3] * 3)
    assert rule.report.flagged
    assert weigh([1.0, 0.0], beta=0.0).tolist() == pytest.approx([0.0, 1.0])
    rule.aggregate(make_cohort(torch.zeros(2, random_rows(1, 1).shape[1]), extras={"accuracy": torch.ones(2)}))
    assert rule.report.flagged  # nobody has moved
    assert rule.report.weights.tolist() == [0.5, 0.5]
    for accuracy in (0.0, 0.7, 1.0):
        assert weigh([accuracy]).tolist() == [1.0]


def test_momentum_is_that_of_heavy_ball_and_steps_are_copies():
    rule, rows = FedFa(gamma=0.5), random_rows(1, 3, torch.float32)
    first = rule.aggregate(make_cohort(rows, [1.0]))
    kept = first.clone()
    second = rule.aggregate(make_cohort(rows, [1.0], when=1))
    torch.testing.assert_close(second, 1.5 * rows[0])
    first.zero_()
    second.zero_()  # a strategy may do with a step what it likes
    torch.testing.assert_close(kept, rows[0])
    torch.testing.assert_close(rule.aggregate(make_cohort(rows, [1.0], when=2)), 1.75 * rows[0])


@pytest.mark.parametrize("accuracy", [[0.5], [0.5, -0.1], [0.5, 1.1], [0.5, float("nan")], [[0.5, 0.5], [0.5, 0.5]]])
def test_accuracies_that_are_none(accuracy):
    with pytest.raises(ValueError, match="accuracy"):
        FedFa().aggregate(make_cohort(random_rows(2, 1), extras={"accuracy": torch.tensor(accuracy)}))
