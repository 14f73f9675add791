# SPDX-License-Identifier: Apache-2.0
"""Which rows count as zero beside the others."""

import math

import numpy as np
import pytest
import torch
from algorithm_cohorts import SIZES, make_cohort, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.algorithms import FedFV, FedLF, FedMDFG, FedMGDAPlus
from fl_lightning.algorithms._shared.rows import live_rows
from fl_lightning.core.layout import ParamLayout

RULES = {
    "FedMGDAPlus": FedMGDAPlus,
    "FedMGDAPlus-free": lambda: FedMGDAPlus(epsilon=1.0),
    "FedMDFG": FedMDFG,
    "FedLF": FedLF,
    "FedLF-model": lambda: FedLF(layers="model"),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("size", [1e7, 1e9, 1e14])
def test_one_huge_update_silences_nobody(name, size):
    """The direction is that for the same update at an ordinary length.

    In FedLF the direction of every layer is. The lengths of layers follow the mean length of their rows.
    """
    rows, steps = random_rows(10, 4), []
    rows[:9] += random_rows(1, 5)
    for factor in (-1.0, -size):
        sent = rows.clone()
        sent[9] *= factor
        rule = RULES[name]()
        step = rule.aggregate(make_cohort(sent, layout=ParamLayout.from_sizes((92,)) if "model" in name else None))
        assert not rule.report.flagged
        steps.append([part / part.norm() for part in (step.split(SIZES) if name == "FedLF" else [step])])
        if not name.startswith("FedMGDAPlus"):
            assert (sent @ step > 0).all()
    torch.testing.assert_close(*steps, rtol=0, atol=1e-6)


def test_an_absent_client_still_counts_beside_a_huge_update():
    """FedFV projects off a remembered row in conflict, however long a row of the round is."""
    rows, absent = random_rows(3, 6), random_rows(1, 7)
    rows[2] *= 1e9
    step = rows.sum(0)
    absent -= (absent @ step)[:, None] / (step @ step) * step + 0.1 / step.norm() * step  # a conflict of -0.1 |step|
    found = []
    for factor in (1.0, 1e-9):
        rule = FedFV(alpha=1.0, tau=1)
        rule.aggregate(make_cohort(factor * absent, [1.0], [7], 0))
        rule.aggregate(make_cohort(rows, ids=[0, 1, 2], when=1))
        found.append(rule.report.scalars["external_conflicts"])
    assert found == [1.0, 0.0]  # beside rows of usual length 1e-9 is nothing


@given(
    lengths=st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=9),
    zeros=st.integers(0, 3),
    seed=st.integers(0, 99),
    remembered=st.lists(st.floats(0, 1e3), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_rows_count_beside_the_median_of_those_that_are_not_zero(lengths, zeros, seed, remembered):
    online = np.random.default_rng(seed).permutation([*lengths, *[0.0] * zeros])
    median = sorted(lengths)[math.ceil(len(lengths) / 2) - 1]
    norms = torch.tensor([*online, *remembered], dtype=torch.float64)
    assert live_rows(norms, len(online)).tolist() == [n > 1e-8 * median for n in norms.tolist()]
    both = torch.stack([norms, torch.zeros_like(norms)])
    both[1, len(online) :] = 1.0
    assert live_rows(both, len(online))[0].equal(live_rows(norms, len(online)))
    assert not live_rows(both, len(online))[1].any()  # no online row to compare with
