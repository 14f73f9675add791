# SPDX-License-Identifier: Apache-2.0
"""Cohorts for tests of guards, without a Trainer."""

import torch
from algorithm_cohorts import COLUMNS, make_cohort, random_rows


def crowd(m=9, seed=0, dtype=torch.float64, n=COLUMNS, layout=None, **more):
    """Random rows, one of which is far away."""
    rows = random_rows(m, seed, dtype, n)
    rows[m // 2] *= 40
    return make_cohort(rows, layout=layout, **more)
