# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.algorithms import FedAvg, QFedAvg

few = settings(max_examples=20, deadline=None, derandomize=True)
losses_of = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=7)


@few
@given(losses_of, st.integers(0, 99))
def test_q_0_is_the_uniform_mean(losses, seed):
    cohort = make_cohort(random_rows(len(losses), seed), losses)
    torch.testing.assert_close(
        QFedAvg(0.0).aggregate(cohort), FedAvg("uniform").aggregate(cohort), rtol=1e-12, atol=1e-14
    )


@few
@given(losses_of, st.floats(0.0, 5.0), st.integers(0, 99))
def test_larger_losses_weigh_more(losses, q, seed):
    rule = QFedAvg(q)
    rule.aggregate(make_cohort(random_rows(len(losses), seed), losses))
    weights = rule.report.weights
    assert (weights[torch.tensor(losses).argsort()].diff() >= -1e-15).all()
    assert 0 < weights.sum() <= 1 + 1e-12


@few
@given(losses_of, st.floats(0.0, 5.0), st.floats(1e-6, 1e6))
def test_weights_depend_on_the_squared_rows_over_the_learning_rate(losses, q, scale):
    rows, one, two = random_rows(len(losses), 3), QFedAvg(q), QFedAvg(q)
    one.aggregate(make_cohort(rows, losses, lr=0.1))
    two.aggregate(make_cohort(scale * rows, losses, lr=0.1 * scale**2))
    torch.testing.assert_close(one.report.weights, two.report.weights, rtol=1e-9, atol=0)


def test_one_client_by_hand():
    # F = 2, u = (3, 4), eta = 0.5, q = 1: Delta = 2 (6, 8), h = 100 + 2 / 0.5 = 104
    rows = torch.zeros(1, 92, dtype=torch.float64)
    rows[0, :2] = torch.tensor([3.0, 4.0])
    step = QFedAvg(1.0).aggregate(make_cohort(rows, [2.0], lr=0.5))
    assert step[:2].tolist() == pytest.approx([12 / 104, 16 / 104], rel=1e-9)


def test_losses_of_zero_stay_finite():
    rows = random_rows(3, 4)
    for q in (0.0, 0.1, 1.0, 5.0):
        for losses in ([0.0, 0.0, 0.0], [0.0, 1.0, 2.0]):
            step = QFedAvg(q).aggregate(make_cohort(rows, losses))
            assert step.isfinite().all()
            assert step.norm() > 0
    # q < 1: h = q F^(q-1) ||g||^2 is huge where F is 0
    short, long = (QFedAvg(0.1).aggregate(make_cohort(rows, F)).norm() for F in ([0.0, 1.0, 2.0], [1.0, 1.0, 2.0]))
    assert short < 1e-6 * long


@pytest.mark.parametrize("losses", [[1e300, 1e299, 1.0], [1e-300, 2e-300, 0.0], [1e30, 1e-30, 1.0]])
def test_powers_of_large_and_small_losses_do_not_overflow(losses):
    step = QFedAvg(5.0).aggregate(make_cohort(random_rows(3, 5), losses))
    assert step.isfinite().all()


def test_long_rows_in_half_precision_do_not_overflow():
    rows = torch.full((2, 92), 6e4, dtype=torch.float16)
    rule = QFedAvg(1.0)
    rule.aggregate(make_cohort(rows, [1.0, 1.0], lr=1e12))
    assert rule.report.weights.tolist() == pytest.approx([1 / (2 + 2 * 92 * 6e4**2 / 1e12)] * 2, rel=1e-3)
    huge = torch.full((2, 92), 1e25)  # the squares leave the range of float32
    rule.aggregate(make_cohort(huge, [1.0, 1.0], lr=1e52))
    assert rule.report.weights.tolist() == pytest.approx([1 / (2 + 2 * 92 * 1e50 / 1e52)] * 2, rel=1e-5)


def test_nobody_moved():
    rule = QFedAvg()
    assert not rule.aggregate(make_cohort(torch.zeros(2, 92), lr=0.0)).any()
    assert rule.report.flagged
    with pytest.raises(ValueError, match="client_lr must be positive for QFedAvg where clients moved, found 0"):
        rule.aggregate(make_cohort(random_rows(2, 6), lr=0.0))
