# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.algorithms import DRFL, FedAvg


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=7))
def test_weights_are_shares_of_the_loss(losses):
    rule = DRFL()
    rule.aggregate(make_cohort(random_rows(len(losses), 1), losses))
    assert rule.report.weights.tolist() == pytest.approx([F / sum(losses) for F in losses], rel=1e-9)


def test_equal_and_zero_losses_give_the_uniform_mean():
    for losses, flagged in (([2.0] * 3, False), ([0.0] * 3, True)):
        rule, cohort = DRFL(), make_cohort(random_rows(3, 2), losses)
        torch.testing.assert_close(rule.aggregate(cohort), FedAvg("uniform").aggregate(cohort))
        assert rule.report.flagged == flagged
    huge = DRFL()
    huge.aggregate(make_cohort(random_rows(3, 3), [1.5e308, 1.5e308, 0.0]))
    assert huge.report.weights.tolist() == [0.5, 0.5, 0.0]
