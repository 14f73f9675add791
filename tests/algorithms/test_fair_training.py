# SPDX-License-Identifier: Apache-2.0
"""Small federations from end to end, without a Trainer."""

import pytest
import torch
from algorithm_cohorts import make_cohort

from fl_lightning.algorithms import AFL, TERM, FedAvg, FedFV, FedGini, FedLF, FedMDFG, FedMGDAPlus, QFedAvg
from fl_lightning.core.layout import ParamLayout

N, SIZES = 8, (10, 6, 4)


def federate(rule, clients_per_round, rounds=60, lr=0.05):
    """Quadratic clients, most of them alike and one far away with few samples; returns losses per round ``[T, N]``."""
    generator = torch.Generator().manual_seed(5)
    n = sum(SIZES)
    centre = torch.randn(n, generator=generator, dtype=torch.float64)
    b = centre + 0.3 * torch.randn(N, n, generator=generator, dtype=torch.float64)
    b[-1] = -centre
    a = 0.5 + torch.rand(N, n, generator=generator, dtype=torch.float64)
    loss = lambda w: 0.5 * (a * (w - b) ** 2).sum(1) / n  # noqa: E731
    sizes = torch.tensor([100.0] * (N - 1) + [10.0])
    layout = ParamLayout.from_sizes(SIZES)
    w, path = torch.zeros(n, dtype=torch.float64), []
    for t in range(rounds):
        ids = torch.randperm(N, generator=generator)[:clients_per_round].tolist()
        rows = lr * 20 * (a * (w - b) / n)[ids]
        cohort = make_cohort(
            rows, loss(w)[ids], ids, t, layout, lr * 20, lambda p, ids=ids: loss(p)[ids], sizes[ids], params=w
        )
        w = w - rule.aggregate(cohort)
        path.append(loss(w))
    return torch.stack(path)


@pytest.mark.parametrize("rule", [FedLF, FedMDFG], ids=["FedLF", "FedMDFG"])
def test_every_client_improves_in_every_early_round(rule):
    """Later the model is almost Pareto stationary and a step as long as the mean update overshoots."""
    path = federate(rule(), N, rounds=5, lr=0.02)
    assert (path.diff(dim=0) < 0).all()
    assert path[-1].max() < path[0].max()


@pytest.mark.parametrize(("rule", "clients_per_round"), [(FedLF, N), (FedLF, 4), (FedMDFG, 4), (FedFV, 4)])
def test_worst_client_ends_better_off_than_under_fedavg(rule, clients_per_round):
    average = federate(FedAvg(), clients_per_round)[-10:].max(1).values.mean()
    fair = federate(rule(), clients_per_round)[-10:].max(1).values.mean()
    assert fair < 0.9 * average


def test_fedmgda_goes_from_the_average_to_the_worst_client():
    """With all clients online; with a few it forgets those who are absent."""
    worst = [federate(FedMGDAPlus(epsilon), N)[-10:].max(1).values.mean() for epsilon in (0.0, 0.1, 1.0)]
    assert worst[0] > worst[1] > 1.5 * worst[2]


@pytest.mark.parametrize(
    "rules",
    [
        [QFedAvg(q) for q in (0.0, 0.1, 1.0, 5.0)],
        [TERM(t) for t in (0.01, 1.0, 5.0)],
        [AFL(gamma) for gamma in (0.0, 0.01, 0.05)],
        [FedGini(epsilon) for epsilon in (1.0, 0.5, 0.0)],
    ],
    ids=["QFedAvg", "TERM", "AFL", "FedGini"],
)
def test_more_tilt_helps_more(rules):
    worst = [float(federate(rule, N)[-10:].max(1).values.mean()) for rule in rules]
    assert worst == sorted(worst, reverse=True)
    assert worst[-1] < 0.99 * worst[0]
