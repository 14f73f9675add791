# SPDX-License-Identifier: Apache-2.0
import torch
from algorithm_cohorts import make_cohort, random_rows

from fl_lightning.algorithms import DRFL, FedAvg


def test_equal_and_zero_losses_give_the_uniform_mean():
    for losses, flagged in (([2.0] * 3, False), ([0.0] * 3, True)):
        rule, cohort = DRFL(), make_cohort(random_rows(3, 2), losses)
        torch.testing.assert_close(rule.aggregate(cohort), FedAvg("uniform").aggregate(cohort))
        assert rule.report.flagged == flagged
    huge = DRFL()
    huge.aggregate(make_cohort(random_rows(3, 3), [1.5e308, 1.5e308, 0.0]))
    assert huge.report.weights.tolist() == [0.5, 0.5, 0.0]
