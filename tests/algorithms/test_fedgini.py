# SPDX-License-Identifier: Apache-2.0
import pytest
from algorithm_cohorts import make_cohort, random_rows

from fl_lightning.algorithms import FedGini


def weights(losses, epsilon=0.5):
    rule = FedGini(epsilon)
    rule.aggregate(make_cohort(random_rows(len(losses), 1), losses))
    return rule.report.weights


def test_equal_losses_have_equal_weights():
    assert weights([1.0] * 4).tolist() == pytest.approx([0.25] * 4)
    # 1, 1 + 2 x, 1 + 6 x with x = 3 (1 - 0.5) / 24; the first two share theirs
    found = weights([0.1, 0.1, 7.0])
    assert found.tolist() == pytest.approx([1.0625 / 3.5, 1.0625 / 3.5, 1.375 / 3.5])
