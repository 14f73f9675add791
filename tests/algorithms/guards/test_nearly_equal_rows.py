# SPDX-License-Identifier: Apache-2.0
"""Guards that compare rows, on rows that differ in their last digits, against differences taken in float64."""

import pytest
import torch
from algorithm_cohorts import make_cohort
from test_guards_of_papers import paper_choice, paper_scores

from fl_lightning import guards
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state

LAYOUT = ParamLayout.from_sizes((20_000, 13, 4_987))
M = 11


def nearly_equal(dtype, spread, far):
    """Rows at a relative distance ``spread``, one of them ``far`` times as long, and their values in float64."""
    noise = torch.Generator().manual_seed(int(-torch.tensor(spread).log10()))
    common = torch.randn(LAYOUT.numel, generator=noise, dtype=torch.float64)
    rows = common + spread * torch.randn(M, LAYOUT.numel, generator=noise, dtype=torch.float64)
    rows[7] *= far
    cohort = make_cohort(rows.to(dtype), layout=LAYOUT)
    return cohort, cohort.updates.rows.double()


def every_case(test):
    test = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)(
        test
    )
    return pytest.mark.parametrize("spread", [1e-1, 1e-4, 1e-6])(test)


@every_case
@pytest.mark.parametrize("far", [1.0, 1e3])
def test_distances_and_choices(dtype, spread, far):
    cohort, rows = nearly_equal(dtype, spread, far)
    exact = torch.stack([(rows - row).square().sum(1) for row in rows])
    torch.testing.assert_close(cohort.updates.squared_distances(), exact, rtol=1e-12, atol=0)
    scores = paper_scores(rows, 2)
    order = sorted(range(M), key=scores.__getitem__)
    assert guards.Krum(2).judge(cohort).remaining(M) == order[:1]
    assert guards.MultiKrum(2).judge(cohort).remaining(M) == sorted(order[: M - 2])
    assert guards.Bulyan(2).judge(cohort).remaining(M) == sorted(paper_choice(rows, 2))


@every_case
@pytest.mark.parametrize("far", [1.0, 1e3])
def test_weights_of_the_geometric_median(dtype, spread, far):
    """Algorithm 2 of RFA on vectors."""
    cohort, rows = nearly_equal(dtype, spread, far)
    alpha = cohort.sizes / cohort.sizes.sum()
    weights = alpha
    for _ in range(30):
        beta = alpha / (rows - weights @ rows).norm(dim=1).clamp_min(1e-3)
        weights = beta / beta.sum()
    found = guards.GeometricMedian(smoothing=1e-3, iterations=30, rows="own").judge(cohort)
    torch.testing.assert_close(found.scale, weights / alpha, rtol=1e-6, atol=0)


@every_case
def test_radius_of_centred_clipping(dtype, spread):
    """Equation 5 on vectors, around the centre that a round before has left."""
    cohort, rows = nearly_equal(dtype, spread, 1.0)
    v = rows[0] + spread * rows[1].roll(1)
    v = v.to(dtype).double()
    lengths = (rows - v).norm(dim=1)
    guard = guards.CentredClipping(float(lengths.mean()))
    rule_state.load_state_dict(guard, {"center": v.to(dtype)})
    commit_or_undo = rule_state.transaction(guard)
    found = guard.judge(cohort)
    commit_or_undo(False)
    expected = torch.where(lengths > guard.radius, guard.radius / lengths, 1.0)
    torch.testing.assert_close(found.scale, expected, rtol=1e-10, atol=0)
    apart = (guard.guarded(cohort).updates.rows.double() - v).norm(dim=1)
    assert bool((apart <= guard.radius + torch.finfo(dtype).eps * v.norm()).all())
    mean = v + (expected[:, None] * (rows - v)).mean(0)
    limits = torch.finfo(dtype)
    close = {"rtol": 0.51 * limits.eps, "atol": limits.tiny * limits.eps + 4e-15}  # rounded once
    torch.testing.assert_close(guard.center.double(), mean, **close)
