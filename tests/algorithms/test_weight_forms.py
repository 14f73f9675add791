# SPDX-License-Identifier: Apache-2.0
"""Every rule that weighs clients against its form on models, in loops."""

import pytest
import torch
import weight_forms as forms
from algorithm_cohorts import make_cohort, random_rows
from cases import pairwise
from cohort_families import FAMILIES, rounds_of

from fl_lightning.algorithms import AFL, DRFL, TERM, AAggFF, FedFa, FedGini, FedPW, QFedAvg

# Each: the options, cohorts as (clients of a round, clients), the seed and the number of rounds, the rule, its form.
CASES = {
    "QFedAvg": ([0.0, 0.1, 1.0, 5.0], [(1, 1), (3, 7), (6, 6)], 1, 3, QFedAvg, lambda q, clients: forms.QFedAvg(q)),
    "TERM": (
        [(t, *reading) for t in (0.1, 1.0, 5.0) for reading in (("library", 0.5), ("paper", 0.3), ("code", 0.3))],
        [(1, 1), (3, 7), (6, 6)], 2, 4, lambda of: TERM(*of), lambda of, clients: forms.TERM(*of),
    ),
    "AFL": ([0.0, 0.01, 0.5, 5.0], [(1, 1), (3, 3), (4, 5), (6, 6)], 3, 6, AFL, forms.AFL),
    "DRFL": ([None], [(1, 1), (3, 7), (6, 6)], 4, 3, lambda _: DRFL(), lambda _, clients: forms.DRFL()),
    "FedGini": (
        [0.0, 0.1, 0.5, 1.0], [(1, 1), (2, 5), (3, 7), (6, 6)], 5, 3, FedGini, lambda e, clients: forms.FedGini(e),
    ),
    "FedFa": (
        [(0.5, 0.9), (0.0, 0.5), (1.0, 0.0)], [(1, 1), (1, 4), (3, 7), (6, 6)], 6, 5,
        lambda of: FedFa(*of), lambda of, clients: forms.FedFa(*of),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "family", "option", "cohort", "scale"),
    [
        (name, *case)
        for name, (options, cohorts, *_) in CASES.items()
        for case in pairwise(FAMILIES, options, cohorts, (1e-12, 1.0, 1e12))
    ],
)
def test_equals_the_vector_form(name, family, option, cohort, scale):
    (m, clients), (*_, seed, rounds, rule, form) = cohort, CASES[name]
    more = {"lr": 0.05 * scale**2} if name == "QFedAvg" else {"num_clients": clients} if name == "AFL" else {}
    cohorts = rounds_of(family, m, seed, rounds, clients, scale, **more)
    forms.compare(rule(option), form(option, clients), cohorts)


@pytest.mark.parametrize(
    ("rule", "losses", "weights"),
    [
        (FedGini(0.5), [1.0] * 4, [1 / 4] * 4),
        # 1, 1 + 2 x, 1 + 6 x with x = 3 (1 - 0.5) / 24; the first two share theirs
        (FedGini(0.5), [0.1, 0.1, 7.0], [1.0625 / 3.5, 1.0625 / 3.5, 1.375 / 3.5]),
        (DRFL(), [2.0] * 3, [1 / 3] * 3),
        (DRFL(), [0.0] * 3, [1 / 3] * 3),
        (DRFL(), [1.5e308, 1.5e308, 0.0], [1 / 2, 1 / 2, 0.0]),
        *((QFedAvg(5.0), losses, None) for losses in ([1e300, 1e299, 1.0], [1e-300, 2e-300, 0.0], [1e30, 1e-30, 1.0])),
    ],
)  # fmt: skip
def test_equal_losses_and_those_at_the_limits_of_float64(rule, losses, weights):
    cohort = make_cohort(random_rows(len(losses), 1), losses)
    assert rule.aggregate(cohort).isfinite().all()
    assert weights is None or rule.report.weights.tolist() == pytest.approx(weights)
    assert rule.report.flagged == (isinstance(rule, DRFL) and not any(losses))


@pytest.mark.parametrize("rule", [AAggFF, DRFL, FedPW, QFedAvg])
def test_negative_losses_are_refused(rule):
    with pytest.raises(ValueError, match=rf"losses must not be negative for {rule.__name__}, found \[1.0, -0.5\] from"):
        rule().aggregate(make_cohort(random_rows(2, 7), torch.tensor([1.0, -0.5])))
