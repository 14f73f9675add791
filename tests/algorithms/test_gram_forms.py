# SPDX-License-Identifier: Apache-2.0
"""Every Gram-space rule against its vector form, where the direction is not so short that few of its digits count."""

import math

import numpy as np
import pytest
import qp_cases
import torch
import vector_forms
from algorithm_cohorts import make_cohort, switched
from cases import pairwise
from cohort_families import FAMILIES, LAYOUT, rounds_of

from fl_lightning.algorithms import FedFV, FedLF, FedMDFG, FedMGDAPlus

SCALES = (1e-12, 1.0, 1e12)
COHORTS = [(1, 1), (1, 4), (3, 3), (3, 7), (5, 9)]


def assert_equal(step, expected):
    assert np.linalg.norm(step.numpy() - expected) <= 1e-9 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("family", "equalise", "window", "cohort", "scale"),
    pairwise(FAMILIES, [True, False], ["ratio", "last", "all", "none", 0, 1, 2], COHORTS, SCALES),
)
def test_fedlf(family, equalise, window, cohort, scale):
    m, clients = cohort
    memory, compared = vector_forms.Remembered(window), 0
    rule = FedLF(reading="library" if equalise else "paper", history_window=window)
    for cohort in rounds_of(family, m, 3, 4, clients, scale):
        absent = memory.absent(cohort.client_ids, cohort.round)
        step = rule.aggregate(cohort)
        expected, blocks, shortest = vector_forms.fedlf(
            cohort.updates.rows.numpy(), cohort.losses.numpy(), absent, LAYOUT.layer_starts, equalise
        )
        assert (rule.report.scalars["blocks"], rule.report.scalars["history_rows"]) == (len(blocks), len(absent))
        if shortest > 1e-3:
            assert_equal(step, expected)
            compared += 1
        memory.store(cohort)
    assert compared > 1


def quadratic_losses(gradients, losses, curvature):
    """Losses with the given values and gradients at 0, and some curvature."""
    return lambda params: losses + gradients @ params + curvature * params @ params


SEARCHES = [(0.01, 5), (math.pi / 16, 3), (1.5, 1), (0.3, 0)]  # theta and s


@pytest.mark.parametrize(("family", "search", "cohort", "scale"), pairwise(FAMILIES, SEARCHES, COHORTS, SCALES))
def test_fedmdfg(family, search, cohort, scale):
    m, clients = cohort
    eta, compared = 0.1, 0
    rule, other = FedMDFG(theta=search[0], s=search[1]), vector_forms.FedMDFG(*search, 1e-4)
    for cohort in rounds_of(family, m, 4, 3, clients, scale):
        eta *= 0.9  # rows of earlier rounds were made with another rate
        ids, when, gradients, losses = cohort.client_ids, cohort.round, cohort.updates.rows, scale**2 * cohort.losses
        asked = quadratic_losses(gradients, losses, [0.01, 1.0, 30.0][when])
        step = rule.aggregate(make_cohort(eta * gradients, losses, ids, when, LAYOUT, eta, asked))
        there = lambda a_d, asked=asked: asked(-torch.from_numpy(a_d)).numpy()  # noqa: E731
        expected = other.step(gradients.numpy(), losses.numpy(), ids, when, eta, there)
        if other.direction > 1e-3:
            assert_equal(step, expected)
            assert rule.report.scalars["step_length"] == pytest.approx(other.length / eta)
            compared += 1
        assert rule.reference == pytest.approx(other.reference)
    assert compared > 1


@pytest.mark.parametrize(
    ("family", "kind", "alpha", "cohort", "scale"),
    pairwise(
        FAMILIES, [*(("library", "absent", tau) for tau in range(4)), *(("code", "reference", tau) for tau in (1, 3))],
        [0.0, 0.34, 1.0], [*COHORTS, (6, 15)], [*((scale, 0.0) for scale in SCALES), (1.0, 1e-6), (1.0, 3.0)],
    ),
)  # fmt: skip
def test_fedfv(family, kind, alpha, cohort, scale):
    (reading, window, tau), (m, clients), (scale, eps), compared = kind, cohort, scale, 0
    rule = switched(FedFV(alpha, tau, reading), eps=eps)
    other = vector_forms.FedFV(alpha, tau, window, eps=eps)
    for cohort in rounds_of(family, m, 5, 5, clients, scale):
        step = rule.aggregate(cohort)
        expected = other.step(cohort.updates.rows.numpy(), cohort.losses.numpy(), cohort.client_ids, cohort.round)
        if other.length > 1e-3:
            assert_equal(step, expected)
            compared += 1
    assert compared > 2


@pytest.mark.parametrize(("family", "epsilon", "m", "scale"), pairwise(FAMILIES, [0.0, 0.1, 1.0], [1, 3, 5], SCALES))
def test_fedmgda(family, epsilon, m, scale):
    for cohort in rounds_of(family, m, 6, 3, m, scale):
        rule, rows = FedMGDAPlus(epsilon, server_lr=0.7), cohort.updates.rows.numpy()
        step = rule.aggregate(cohort)
        norms = np.linalg.norm(rows, axis=1)
        lam = rule.report.weights.numpy() * norms / 0.7
        if rule.report.scalars["direction_norm"] > 1e-3:
            assert_equal(step, vector_forms.fedmgda(rows, lam, 0.7))
        share = np.where(norms > 0, cohort.sizes.numpy(), 0)
        share /= share.sum()
        lower = np.where(norms > 0, np.maximum(0, share - epsilon), 0)
        upper = np.where(norms > 0, np.minimum(1, share + epsilon), 0)
        assert (lam >= lower - 1e-12).all()
        assert (lam <= upper + 1e-12).all()
        assert abs(lam.sum() - 1) <= 1e-12
        units = np.stack([vector_forms.unit(row) if row.any() else row for row in rows])
        gram = units @ units.T
        assert lam @ gram @ lam <= qp_cases.enumerate_faces(gram, lower, upper) + 1e-9
