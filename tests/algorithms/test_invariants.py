# SPDX-License-Identifier: Apache-2.0
"""What must hold of every step, on cohorts that hypothesis makes up: small whole numbers depend on each other often."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from algorithm_cohorts import make_cohort, switched
from hypothesis import HealthCheck, assume, given, settings
from hypothesis.extra.numpy import arrays
from test_common_descent import DESCENTS

from fl_lightning.algorithms import FedAvg, FedFV, FedLF, FedMDFG, FedMGDAPlus
from fl_lightning.algorithms._shared.rows import loss_angle
from fl_lightning.core.layout import ParamLayout

COLUMNS = (3, 1, 4)
LAYOUT = ParamLayout.from_sizes(COLUMNS)
quick = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

numbers = st.one_of(st.integers(-3, 3).map(float), st.floats(-4, 4, width=16))


@st.composite
def cohorts(draw, most=5, independent=False):
    """Rows ``[m, 8]`` and losses; ``independent`` rows do not nearly depend on each other."""
    m = draw(st.integers(1, most))
    rows = draw(arrays(np.float64, (m, sum(COLUMNS)), elements=numbers))
    if independent:
        rows = rows + 4 * np.roll(np.eye(m, sum(COLUMNS)), draw(st.integers(0, 3)), 1)
    losses = draw(st.lists(st.floats(0.125, 5, width=16), min_size=m, max_size=m))
    if independent:
        assume(np.linalg.norm(rows, axis=1).min() > 0.1)
        assume(np.linalg.svd(rows / np.linalg.norm(rows, axis=1, keepdims=True), compute_uv=False).min() > 0.1)
    return make_cohort(torch.from_numpy(rows), losses, layout=LAYOUT, lr=1.0)


ALL = {**DESCENTS, "FedAvg": FedAvg, "FedFV": lambda: FedFV(alpha=0.3), "FedMGDAPlus-near": FedMGDAPlus}
every_rule = pytest.mark.parametrize("name", ALL)
every_common_descent = pytest.mark.parametrize("name", DESCENTS)


@every_common_descent
@given(cohort=cohorts(independent=True))
@quick
def test_with_independent_rows_everybody_gains(name, cohort):
    rule = DESCENTS[name]()
    step = rule.aggregate(cohort)
    assert (cohort.updates.rows @ step > 0).all()


@given(cohort=cohorts(independent=True))
@quick
def test_one_block_of_rows_of_one_length_is_fedmdfg(cohort):
    rows = cohort.updates.rows / cohort.updates.rows.norm(dim=1, keepdim=True)
    assume(loss_angle(cohort.losses) > 0.02)
    whole = make_cohort(rows, cohort.losses, layout=LAYOUT.merged())
    one = switched(FedLF("model", "paper"), fair_kind="h").aggregate(whole)
    two = FedMDFG(theta=0.01).aggregate(whole)
    torch.testing.assert_close(one / one.norm(), two / two.norm(), rtol=0, atol=1e-9)


@every_rule
@given(cohort=cohorts(), exponent=st.integers(-40, 40))
@quick
def test_weights_do_not_depend_on_the_scale(name, cohort, exponent):
    factor = 2.0**exponent
    # FedMDFG compares losses with products of gradients; the others do not know the unit of a loss.
    lr, losses = (1.0, factor**2 * cohort.losses) if name == "FedMDFG" else (factor, cohort.losses)
    scaled = make_cohort(factor * cohort.updates.rows, losses, layout=LAYOUT, lr=lr, sizes=cohort.sizes)
    rules = [ALL[name](), ALL[name]()]
    step = rules[0].aggregate(cohort)
    assert torch.equal(rules[1].aggregate(scaled), factor * step)
    assert torch.equal(rules[0].report.weights, rules[1].report.weights)
