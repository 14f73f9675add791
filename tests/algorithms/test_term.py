# SPDX-License-Identifier: Apache-2.0
import torch
from algorithm_cohorts import make_cohort, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.algorithms import TERM, FedAvg
from fl_lightning.core.storage import rule_state

few = settings(max_examples=20, deadline=None, derandomize=True)
losses_of = st.lists(st.floats(-50, 50), min_size=1, max_size=7)


def test_the_limits_of_float64_are_no_limits():
    rows = random_rows(3, 5)
    for reading in ("library", "paper"):
        rule = TERM(1e6, reading)
        for losses in ([1e30, 0.0, 1.0], [0.0, 0.0, 0.0], [-1e30, 5.0, 5.0], [800.0, 799.0, 1.0]):
            assert rule.aggregate(make_cohort(rows, losses)).isfinite().all()
    largest = TERM(1e6)
    largest.aggregate(make_cohort(rows, [800.0, 799.0, 1.0]))
    assert largest.report.weights.tolist() == [1.0, 0.0, 0.0]


def test_the_reference_takes_two_fifths_of_a_step_with_five_clients():
    """What the authors' code does in its first round with little tilt: 2/m of FedAvg's step."""
    cohort = make_cohort(random_rows(5, 6))
    step, mean = TERM(1e-12, "code").aggregate(cohort), FedAvg("uniform").aggregate(cohort)
    torch.testing.assert_close(step, 0.4 * mean, rtol=1e-9, atol=0)
    torch.testing.assert_close(TERM(1e-12, "paper").aggregate(cohort), mean, rtol=1e-9, atol=0)


def test_only_the_moving_average_is_state():
    cohort = make_cohort(random_rows(3, 7), [0.1, 0.2, 0.3])
    for reading, keys in (("library", set()), ("paper", {"log_r"}), ("code", {"log_r"})):
        rule = TERM(1.0, reading)
        rule.aggregate(cohort)
        assert set(rule_state.state_dict(rule)) == keys
        assert rule.averages == (reading == "library")
    full = TERM(1.0, "paper", ema_rate=1.0)
    for losses in ([5.0, 5.0, 6.0], [0.1, 0.2, 0.3]):
        full.aggregate(make_cohort(random_rows(3, 7), losses))
    torch.testing.assert_close(full.aggregate(cohort), TERM().aggregate(cohort))


@few
@given(losses_of, st.floats(0.05, 20))
def test_the_weights_of_fedeba_are_those_of_a_tilt(losses, tau):
    """They maximise ``sum_i p_i (F_i - tau log p_i)`` over the simplex: every other point has a smaller value."""
    rule, values = TERM(1 / tau), torch.tensor(losses, dtype=torch.float64)
    rule.aggregate(make_cohort(random_rows(len(losses), 4), losses))

    def entropic(p):
        return float((p * values).sum() - tau * torch.special.xlogy(p, p).sum())

    best = entropic(rule.report.weights)
    for seed in range(5):
        other = torch.rand(len(losses), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert entropic(other / other.sum()) <= best + 1e-9 * (1 + abs(best))
