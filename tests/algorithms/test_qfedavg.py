# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows

from fl_lightning.algorithms import QFedAvg


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
