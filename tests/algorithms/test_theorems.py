# SPDX-License-Identifier: Apache-2.0
"""The papers' theorems, as far as what they say can be computed."""

import pytest
import torch
from algorithm_cohorts import make_cohort, switched

from fl_lightning.algorithms import FedFV, FedLF, FedMDFG
from fl_lightning.core.layout import ParamLayout

LAYOUT = ParamLayout.from_sizes([5, 7])
several = pytest.mark.parametrize("seed", range(12))


def uniform(seed, *shape):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rows_in_conflict(seed):
    """Rows ``[m, 12]`` of very different lengths, any two at an angle somewhat above 90 degrees."""
    m = 2 + seed % 5
    below = (-(0.3 + 0.6 * uniform(seed, m, m)) / m).tril(-1)
    basis = torch.linalg.qr(uniform(seed, 12, m) - 0.5).Q
    return 10 ** -(3 * uniform(seed, m, 1)) * (torch.linalg.cholesky((below + below.T).fill_diagonal_(1.0)) @ basis.T)


def swept(rows):
    """Rows ``[m + 1, m, n]`` before and after each target of projections, and the cosines ``[m (m - 1)]`` met there."""
    stages, cosines = [rows], []
    for target in range(len(rows)):
        now = stages[-1].clone()
        for i in set(range(len(rows))) - {target}:
            cosines.append(float(torch.cosine_similarity(now[i], rows[target], dim=0)))
            now[i] -= now[i] @ rows[target] / rows[target].square().sum() * rows[target]
        stages.append(now)
    return torch.stack(stages), torch.tensor(cosines)


@several
def test_theorems_1_and_2_of_fedfv(seed):
    """The later a client is projected on, the less the mean can conflict with it: (5), and without projected rows."""
    rows = rows_in_conflict(seed)
    m, norms = len(rows), rows.norm(dim=1)
    stages, cosines = swept(rows)
    assert (cosines < 0).all(), "every projection has something to remove, as the theorems assume"
    pairs = (rows @ rows.T / torch.outer(norms, norms)).fill_diagonal_(0).abs()
    least, most = float(cosines.abs().min()), float(max(cosines.abs().max(), pairs.max()))

    shuffled = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    step = FedFV(alpha=0.0, tau=0).aggregate(make_cohort(rows[shuffled], 1.0 + shuffled, layout=LAYOUT))
    mean = step / step.norm() * stages[-1].mean(0).norm()  # before it is made as long as that of the rows
    conflict = (-rows @ mean).clamp_min(0)

    lengths = torch.stack([stages[j].norm(dim=1).sum() - stages[j].norm(dim=1)[j] for j in range(1, m)])
    first = most**2 / m * torch.cat([lengths.flip(0).cumsum(0).flip(0), torch.zeros(1)])
    assert (first.diff() < 0).all()
    assert (conflict <= norms * first + 1e-12).all()
    shrink = (1 - least**2) ** 0.5
    f = most**2 * shrink * (1 - shrink ** (m - 1 - torch.arange(m))) / (1 - shrink)
    f[0] /= shrink  # the row that is first projected on is itself one projection behind, which the paper forgets
    assert (conflict <= (m - 1) / m * norms.max() ** 2 * f + 1e-12).all()


@several
def test_theorem_4_of_fedfv(seed):
    """With the step 1 / L the mean loss falls if the step is within 60 degrees of its gradient, here: only then."""
    rows = rows_in_conflict(seed)  # w - c_i, the gradients of |w - c_i|^2 / 2, where L = 1
    step = FedFV(alpha=0.0, tau=0).aggregate(make_cohort(rows, layout=LAYOUT))
    falls = (rows - step).square().sum() <= rows.square().sum()
    assert falls == (torch.cosine_similarity(step, rows.mean(0), dim=0) >= 0.5)


@several
def test_theorem_1_of_fedmdfg(seed):
    """Losses fall for all clients, and along the fair row as well, where gradients are independent."""
    rows, losses = rows_in_conflict(seed), 0.5 + uniform(seed, 2 + seed % 5)
    rule = FedMDFG(theta=1e-3)
    step = rule.aggregate(make_cohort(rows, losses, layout=LAYOUT))
    assert not rule.report.flagged
    assert rule.report.scalars["fair_row"] == 1
    fair = losses.sum() / losses.square().sum() * losses - 1
    alike = rows / rows.norm(dim=1, keepdim=True)
    assert (rows @ step > 0).all()
    assert fair @ alike @ step > 0


def bowls(seed):
    """Losses ``L_i |w - c_i|^2 / 2``: curvatures ``L [m]``, losses and gradients at a place."""
    m = 2 + seed % 4
    curvatures, centres = 0.5 + uniform(seed, m), uniform(seed, m, 12)
    return curvatures, lambda w: (curvatures * (w - centres).square().sum(1) / 2, curvatures[:, None] * (w - centres))


@several
def test_theorem_1_of_fedlf(seed):
    """Up to the bound of the step no loss rises, above it one does; half of it leads to a Pareto stationary point."""
    curvatures, at = bowls(seed)
    rule, hull = FedLF(), switched(FedLF("model"), fair_kind="none")
    w, ratios = torch.full((12,), 3.0, dtype=torch.float64), []  # of the shortest vector in the hull of the gradients
    for _ in range(200):
        losses, gradients = at(w)
        cohort = make_cohort(gradients, losses, layout=LAYOUT, lr=1.0)
        d = rule.aggregate(cohort)
        hull.aggregate(cohort)
        ratios.append(hull.report.scalars["direction_ratio"])
        if not (gradients @ d > 1e-9).all():
            break
        bound = 2 * ((gradients @ d) / curvatures).min() / d.square().sum()
        assert (at(w - bound * d)[0] <= losses * (1 + 1e-12)).all()
        assert (at(w - 1.001 * bound * d)[0] > losses).any()
        w = w - bound / 2 * d
    assert ratios[0] > 0.99
    assert ratios[-1] < 0.01
