# SPDX-License-Identifier: Apache-2.0
from functools import partial

import pytest
import torch
from algorithm_cohorts import make_cohort

import fl_lightning as fl
from fl_lightning.algorithms import MMPF
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state

LAYOUT = ParamLayout.from_sizes([2])


def paraboloids(points, rule, rounds, lr=0.2, ids=None):
    """Clients whose loss is the squared distance to their point; returns all parameters and all weights."""
    points = torch.tensor(points, dtype=torch.float64)
    theta = torch.zeros(2, dtype=torch.float64)
    path, weights = [theta], []
    for when in range(rounds):
        who = list(range(len(points))) if ids is None else ids(when)

        def losses_at(params, targets=points[who]):
            return (params - targets).square().sum(1)

        rows = lr * 2 * (theta - points[who])
        step = rule.aggregate(make_cohort(rows, losses_at(theta), who, when, LAYOUT, lr, losses_at, params=theta))
        theta = theta - step
        path.append(theta)
        weights.append(rule.report.weights)
    return torch.stack(path), weights


def test_weights_and_models_follow_the_published_search():
    """The authors' loop over weights, written down from their code, with exact minimisers for training."""
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [6.0, 0.0]], dtype=torch.float64)
    rule = MMPF(inner_rounds=40, iterations=8, alpha=0.5, k_min=1)
    path, weights = paraboloids(points.tolist(), rule, 8 * 42 + 5)

    mu, best, keep, k, expected = torch.ones(3).double() / 3, float("inf"), None, 1, []
    for _ in range(8):
        expected.append(mu)
        theta = mu @ points
        losses = (theta - points).square().sum(1)
        if losses.max() < best:
            best, keep, k = float(losses.max()), theta, min(k, 1)
        else:
            k += 1
        behind = (losses >= best).double()
        mu = (1 - 0.5) * mu + 0.5 / k * behind / behind.sum()
        mu = mu / mu.sum()
    seen = [w for w in weights if w.any()]
    distinct = [w for i, w in enumerate(seen) if i == 0 or not torch.allclose(w, seen[i - 1])]
    for one, two in zip(distinct, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(path[-1], keep, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rule.evaluation_params(path[3]), keep, rtol=1e-5, atol=1e-5)
    assert torch.equal(path[-1], path[-2]), "the kept model stays"
    assert best < float((points.mean(0) - points).square().sum(1).max())


def test_partial_participation_moves_weights_among_participants_only():
    rule = MMPF(inner_rounds=1, iterations=100, alpha=0.5)
    points = [[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [5.0, 0.0]]
    paraboloids(points, rule, 2, ids=lambda when: [0, 3])
    assert set(rule.mu) == {0, 3}
    assert rule.mu[3] > rule.mu[0]
    assert rule.mu[0] + rule.mu[3] == pytest.approx(2), "two of the four uniform weights"


def test_models_are_compared_on_the_same_clients():
    """The first model was judged by clients that are easy to serve; later ones are judged by others."""
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [8.0, 0.0], [10.0, 0.0]], dtype=torch.float64)
    rule = MMPF(inner_rounds=4, iterations=1000, patience=1000)
    path, _ = paraboloids(points.tolist(), rule, 120, ids=lambda when: [0, 1] if when < 5 else [2, 3])
    kept = rule.evaluation_params(path[-1])
    torch.testing.assert_close(kept, torch.tensor([9.0, 0.0], dtype=torch.float64), rtol=0, atol=0.2)
    shown = rule.report.scalars["best_worst_loss"]
    assert shown == pytest.approx(float((kept - points[2:]).square().sum(1).max()))


def test_a_server_optimizer_is_refused():
    """Momentum or Adam would take other steps than the one back to the model that was kept."""
    with pytest.raises(ValueError, match="server_optimizer must be left out with MMPF"):
        fl.FederatedStrategy(MMPF(), server_optimizer=partial(torch.optim.SGD, lr=1.0, momentum=0.9))


def test_patience_counts_failures_in_a_row_and_a_reset_counts_anew():
    rule, points = MMPF(inner_rounds=1, iterations=1000, patience=3), [[0.0, 0.0], [4.0, 0.0]]
    path, _ = paraboloids(points, rule, 30)
    assert rule.report.scalars["iteration"] == 9  # better or not: yes yes no yes no yes no no no
    rule_state.reset(rule)
    assert torch.equal(paraboloids(points, rule, 30)[0], path)
    assert rule.report.scalars["iteration"] == 9


def test_a_search_that_ends_with_its_best_model_stays_there():
    path, weights = paraboloids([[0.0, 0.0], [4.0, 0.0]], MMPF(inner_rounds=1, iterations=2), 6)
    assert [bool(weight.any()) for weight in weights] == [True, True, False, False, False, False]
    assert all(torch.equal(theta, path[2]) for theta in path[2:])


def test_the_kept_model_is_a_copy():
    rule, theta = MMPF(inner_rounds=1), torch.ones(2, dtype=torch.float64)
    for when in range(2):
        rule.aggregate(make_cohort(torch.ones(2, 2).double(), torch.ones(2), [0, 1], when, LAYOUT, 0.1, params=theta))
    theta.add_(1)
    assert rule.evaluation_params(theta).tolist() == [1, 1]
