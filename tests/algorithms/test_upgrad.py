# SPDX-License-Identifier: Apache-2.0
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from algorithm_cohorts import SIZES, make_cohort, random_rows
from cohort_families import FAMILIES, LAYOUT, rounds_of

from fl_lightning.algorithms import UPGrad
from fl_lightning.core.layout import ParamLayout

STARTS = [sum(SIZES[:i]) for i in range(len(SIZES) + 1)]


def projection(u, rows):
    """Nearest vector to ``u`` with ``rows @ d >= 0``, by trying every set of rows that may be orthogonal to it."""
    best = None
    for size in range(len(rows) + 1):
        for support in combinations(range(len(rows)), size):
            normal = rows[list(support)]
            d = u - normal.T @ np.linalg.lstsq(normal.T, u, rcond=1e-12)[0] if size else u
            fits = rows @ d >= -1e-9 * np.linalg.norm(rows, axis=1) * np.linalg.norm(u)
            if fits.all() and (best is None or np.linalg.norm(d - u) < np.linalg.norm(best - u)):
                best = d
    return best


def upgrad(rows, starts):
    """The mean of the projections, layer by layer, on vectors."""
    parts = [rows[:, start:end] for start, end in pairwise(starts)]
    return np.concatenate([np.mean([projection(u, part) for u in part], axis=0) for part in parts])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("m", [1, 3, 5])
def test_equals_projections_of_vectors(family, m):
    for cohort in rounds_of(family, m, 2, 3, 7, 1.0):
        rows = cohort.updates.rows.numpy()
        expected = upgrad(rows, LAYOUT.layer_starts)
        step = UPGrad().aggregate(cohort).numpy()
        assert np.linalg.norm(step - expected) <= 1e-7 * np.linalg.norm(rows, axis=1).mean()


def test_a_layer_counts_in_the_weights_by_its_size():
    rows = random_rows(3, 7)
    rule = UPGrad()
    step, shares = rule.aggregate(make_cohort(rows)).numpy(), np.diff(STARTS) / STARTS[-1]
    pieces = [np.linalg.lstsq(rows[:, a:b].T.numpy(), step[a:b], rcond=None)[0] for a, b in pairwise(STARTS)]
    np.testing.assert_allclose(rule.report.weights, shares @ np.stack(pieces), rtol=1e-9)


def test_the_example_that_its_authors_publish():
    """Documentation of TorchJD, ``UPGrad``; that library adds 1e-4 to the diagonal. Beside it, by hand."""
    rows = torch.tensor([[-4.0, 1, 1], [6, 1, 1]], dtype=torch.float64)
    step = UPGrad().aggregate(make_cohort(rows, layout=ParamLayout.from_sizes([3])))
    torch.testing.assert_close(step, torch.tensor([0.2929, 1.9004, 1.9004]).double(), rtol=0, atol=6e-4)
    one, two = rows[0] + 22 / 38 * rows[1], rows[1] + 22 / 18 * rows[0]
    torch.testing.assert_close(step, (one + two) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_conflicts_with_nobody_in_any_layer_and_the_mean_does(dtype):
    against = 0
    for seed in range(30):
        rows = random_rows(8, seed, dtype)
        rows[3] = -rows[0] + 0.1 * rows[1]
        step = UPGrad().aggregate(make_cohort(rows)).double()
        for start, end in pairwise(STARTS):
            part, d = rows[:, start:end].double(), step[start:end]
            assert float((part @ d / part.norm(dim=1)).min()) > 0
            against += int((part @ part.mean(0) < 0).sum())
    assert against > 0


def test_layers_without_a_common_direction_or_without_rows_stand_still():
    rows = random_rows(2, 5)
    rows[1, : STARTS[1]] = -rows[0, : STARTS[1]]
    step = UPGrad().aggregate(make_cohort(rows))
    assert step[: STARTS[1]].norm() < 1e-3 * rows[0].norm()
    rows[:, : STARTS[1]] = 0
    step = UPGrad().aggregate(make_cohort(rows))
    assert not step[: STARTS[1]].any()
    assert step[STARTS[1] :].any()
    rule = UPGrad()
    assert not rule.aggregate(make_cohort(torch.zeros_like(rows))).any()
    assert rule.report.flagged
