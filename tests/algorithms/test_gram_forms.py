# SPDX-License-Identifier: Apache-2.0
"""Every Gram-space rule against its vector form, given the same weights; and the weights against their objective.

A weight vector is not unique where rows depend on each other, and a direction much shorter than its rows has few
digits. So the vector form takes the weights that the rule found, for the hull that it builds itself from vectors. The
weights are judged apart: by their objective on that hull, against enumeration and an interior-point solver.
"""

import numpy as np
import pytest
import qp_cases
import vector_forms
from cases import pairwise
from cohort_families import FAMILIES, LAYOUT, rounds_of

from fl_lightning import ops
from fl_lightning.algorithms import FedFV, FedLF, FedMDFG, FedMGDAPlus
from fl_lightning.ops import _gram_problems

SCALES = (1e-12, 1.0, 1e12)
COHORTS = [(1, 1), (1, 4), (3, 3), (3, 7), (5, 9)]


class Replay:
    """Remembers the weights that a rule found, and gives them to a vector form.

    The compiled ``common_descent`` tells no weights, so that its reference takes its place.
    """

    def __init__(self, monkeypatch):
        self.found, self.used = [], []

        def record(gram):
            found = ops.min_norm(gram)
            self.found += zip(gram.numpy(), found[0].numpy(), strict=True)
            return found

        def descend(gram, online, scale=None, weights=None, **bounds):
            return _gram_problems.common_descent(gram, online, scale, weights, **bounds)

        monkeypatch.setattr(_gram_problems, "min_norm", record)
        monkeypatch.setattr(ops, "common_descent", descend)

    def __call__(self, vectors):
        first = next(v for v in vectors if v is not None)  # a row left out of the hull repeats one that is not
        full = np.stack([first if v is None else v for v in vectors])
        own = full @ full.T
        own /= np.trace(own) / len(own)
        norms = np.sqrt(np.outer(np.diag(own), np.diag(own)))
        distances = [
            np.abs(gram / (np.trace(gram) / len(gram)) - own).max() if len(gram) == len(own) else np.inf
            for gram, _ in self.found
        ]
        nearest = int(np.argmin(distances))
        assert distances[nearest] <= 1e-9 * norms.max(), "the rule solved another hull"
        lam = self.found[nearest][1]
        self.used.append((own, lam))
        return lam @ full

    def judge(self):
        """The hulls have a mean diagonal of 1."""
        for gram, lam in self.used:
            least = qp_cases.independent(gram)
            if len(gram) <= 10:
                least = min(least, qp_cases.enumerate_supports(gram))
            assert lam.min() >= 0
            assert abs(lam.sum() - 1) <= 1e-12
            assert lam @ gram @ lam <= least + 1e-9


def assert_equal(step, expected):
    assert np.linalg.norm(step.numpy() - expected) <= 1e-9 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("family", "equalise", "window", "cohort", "scale"),
    pairwise(FAMILIES, [True, False], ["ratio", "last", "all", "none", 2], COHORTS, SCALES),
)
def test_fedlf(family, equalise, window, cohort, scale, monkeypatch):
    m, clients = cohort
    replay, memory, compared = Replay(monkeypatch), vector_forms.Remembered(window), 0
    rule = FedLF(reading="library" if equalise else "paper", history_window=window)
    for cohort in rounds_of(family, m, 3, 4, clients, scale):
        replay.found.clear()
        absent = memory.absent(cohort.client_ids, cohort.round)
        step = rule.aggregate(cohort)
        expected, blocks, shortest = vector_forms.fedlf(
            cohort.updates.rows.numpy(), cohort.losses.numpy(), absent, LAYOUT.layer_starts, equalise, solver=replay
        )
        assert (rule.report.scalars["blocks"], rule.report.scalars["history_rows"]) == (len(blocks), len(absent))
        if shortest > 1e-3:
            assert_equal(step, expected)
            compared += 1
        memory.store(cohort)
    replay.judge()
    assert compared > 1


@pytest.mark.parametrize(("family", "theta", "cohort", "scale"), pairwise(FAMILIES, [0.01, 1.5], COHORTS, SCALES))
def test_fedmdfg(family, theta, cohort, scale, monkeypatch):
    m, clients = cohort
    replay, eta, compared = Replay(monkeypatch), 0.1, 0
    rule, other = FedMDFG(theta=theta), vector_forms.FedMDFG(theta, 5, 1e-4, replay)
    for cohort in rounds_of(family, m, 4, 3, clients, 0.1 * scale, lr=eta):
        replay.found.clear()
        step = rule.aggregate(cohort)
        rows, asked = cohort.updates.rows.numpy() / eta, lambda a_d, cohort=cohort: cohort.losses_at(a_d).numpy()
        expected = other.step(rows, cohort.losses.numpy(), cohort.client_ids, cohort.round, eta, asked)
        if other.direction > 1e-3:
            assert_equal(step, expected)
            compared += 1
    replay.judge()
    assert compared > 1


@pytest.mark.parametrize(
    ("family", "kind", "alpha", "cohort", "scale"),
    pairwise(FAMILIES, [("library", "absent"), ("code", "reference")], [0.0, 0.34, 1.0], [*COHORTS, (6, 15)], SCALES),
)
def test_fedfv(family, kind, alpha, cohort, scale):
    (reading, window), (m, clients), compared = kind, cohort, 0
    rule, other = FedFV(alpha, 2, reading), vector_forms.FedFV(alpha, 2, window)
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
