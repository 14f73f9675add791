# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from algorithm_cohorts import make_cohort, random_rows

from fl_lightning.algorithms import FedGini


def weights(losses, epsilon=0.5):
    rule = FedGini(epsilon)
    rule.aggregate(make_cohort(random_rows(len(losses), 1), losses))
    return rule.report.weights


def published(losses, epsilon):
    """The published platform: ascending weights, indexed by the order instead of by the rank."""
    m = len(losses)
    b = np.array([1 + (1 - epsilon) * (k + 1) * k / ((m - 1) * m * (m + 1) / 3) for k in range(m)])
    p = b[np.argsort(-np.asarray(losses))]
    return p / p.sum()


def test_the_ranking_is_right_where_published_code_turns_it_around():
    losses = [3.0, 1.0, 5.0, 2.0, 4.0]
    wrong = published(losses, 0.5)
    assert (wrong.argmax(), wrong.argmin()) == (1, 2)  # most to loss 1, least to loss 5
    assert weights(losses).argsort().tolist() == [1, 3, 0, 4, 2]
    assert sorted(weights(losses).tolist()) == pytest.approx(sorted(wrong))


def test_equal_losses_have_equal_weights():
    assert weights([1.0] * 4).tolist() == pytest.approx([0.25] * 4)
    # 1, 1 + 2 x, 1 + 6 x with x = 3 (1 - 0.5) / 24; the first two share theirs
    found = weights([0.1, 0.1, 7.0])
    assert found.tolist() == pytest.approx([1.0625 / 3.5, 1.0625 / 3.5, 1.375 / 3.5])
