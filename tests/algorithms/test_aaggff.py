# SPDX-License-Identifier: Apache-2.0
from math import erf, exp, sqrt

import numpy as np
import pytest
import torch
import weight_forms
from algorithm_cohorts import make_cohort, random_rows

from fl_lightning.algorithms import AAggFF

CDFS = {
    "weibull": lambda x: 1 - exp(-(x**2)),
    "exponential": lambda x: 1 - exp(-x),
    "frechet": lambda x: exp(-1 / x),
    "normal": lambda x: (1 + erf((x - 1) / sqrt(2))) / 2,
    "gumbel": lambda x: exp(-exp(-(x - 1))),
    "logistic": lambda x: 1 / (1 + exp(-(x - 1))),
}


def minimise(curvature, slope):
    """On the simplex, by projected gradients."""
    p, rate = np.full(len(slope), 1 / len(slope)), 1 / np.linalg.eigvalsh(curvature).max()
    for _ in range(200):
        p = np.asarray(weight_forms.nearest_on_simplex(list(p - rate * (curvature @ p + slope))))
    return p


def rounds(m, clients, count, seed):
    generator = torch.Generator().manual_seed(seed)
    for when in range(count):
        ids = torch.randperm(clients, generator=generator)[:m].tolist()
        losses = torch.rand(clients, generator=generator).double().square()[ids] + 0.1 * torch.tensor(ids) + 0.05
        yield make_cohort(random_rows(m, when), losses, ids, when, num_clients=clients)


@pytest.mark.parametrize("response", CDFS)
@pytest.mark.parametrize(("m", "clients"), [(3, 9), (4, 4), (1, 5)])
def test_few_clients_equal_the_authors_vectors(response, m, clients):
    """A softmax over the round's clients is theirs over all, divided by its sum."""
    form = weight_forms.AAggFF("device", clients, CDFS[response])
    weight_forms.compare(AAggFF("device", response), form, rounds(m, clients, 8, 1))


@pytest.mark.parametrize(("clients", "response"), [(2, "gumbel"), (5, "weibull")])
def test_all_clients_equal_the_authors_program(clients, response):
    """Solved by other means than theirs and than the package's."""
    rule = AAggFF("silo", response)
    form = weight_forms.AAggFF("silo", clients, CDFS[response], minimise=minimise)
    for cohort in rounds(clients, clients, 6, 2):
        rule.aggregate(cohort)
        form.step(cohort.updates.rows.numpy(), cohort.losses.tolist(), cohort.client_ids)
        np.testing.assert_allclose(rule.report.weights.numpy(), form.p[list(cohort.client_ids)], rtol=0, atol=1e-7)
    assert rule.report.weights.std() > 1e-3


def test_the_newton_step_is_that_of_projected_gradients():
    rule, p, form = AAggFF("newton"), np.full(5, 0.2), 2.0 * np.eye(5)
    for cohort in rounds(5, 5, 6, 2):
        rule.aggregate(cohort)
        losses = cohort.losses.numpy()[np.argsort(cohort.client_ids)]
        response = np.vectorize(CDFS["gumbel"])(losses / losses.mean()) / 5
        g = -response / (1 + p @ response)
        form += np.outer(g, g)
        p = minimise(form, 2 * g - form @ p)
        np.testing.assert_allclose(rule.report.weights.numpy(), p[list(cohort.client_ids)], rtol=0, atol=1e-7)
    assert p.std() > 1e-3


def test_newcomers_join_without_a_history():
    rule = AAggFF("silo")
    for when in range(3):
        rule.aggregate(make_cohort(random_rows(2, when), [0.1, 3.0], [4, 7], when))
    before = rule.report.weights
    rule.aggregate(make_cohort(random_rows(3, 9), [1.0, 1.0, 1.0], [4, 9, 7], 3))
    new = rule.report.weights
    assert float(new.sum()) == pytest.approx(1)
    assert new[1] < new[0] < new[2]  # what the others have lost in three rounds speaks for them
    assert before[0] < before[1]
