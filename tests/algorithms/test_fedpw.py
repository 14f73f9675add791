# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N806 (letters as in the authors' code)
import numpy as np
import pytest
import torch
from algorithm_cohorts import SIZES, make_cohort, random_rows

from fl_lightning.algorithms import FedAvg, FedPW
from fl_lightning.algorithms.fedpw import smallest
from fl_lightning.core.updates import Columns

CUTS = np.cumsum(SIZES)[:-1]


class Authors:
    """The published class, with its dictionaries over all clients, for rounds that all of them take part in.

    Means are over all numbers, not over every tenth in order of size.
    """

    def __init__(self, clients, drop, beta):
        self.K, self.drop, self.beta0 = clients, drop, beta
        self.delta_p, self.p = [0.0] * clients, [0.0] * clients
        self.delta_dot, self.p_dot = [0.0] * clients, [0.0] * clients
        self.epoch = 0

    def step(self, rows, losses):
        freq = self.update(rows, losses)
        inverse = [sum(losses) / loss for loss in losses]
        rates = [min(x / sum(inverse) * self.K * self.drop, 1) for x in inverse]
        parts = [self.tensor(list(part), freq, rates) for part in zip(*(np.split(r, CUTS) for r in rows), strict=True)]
        self.epoch += 1
        return np.concatenate(parts), freq

    def update(self, rows, losses):
        K, GG = range(self.K), np.array([[a @ b for b in rows] for a in rows])
        w = GG.sum(1)
        loss_avg, dot_avg = sum(losses) / self.K, w.mean()
        if self.epoch == 0:
            self.loss_0, self.dot_0 = loss_avg, dot_avg
        b, c = self.beta0 * loss_avg / self.loss_0, self.beta0 * dot_avg / self.dot_0
        self.delta_p = [(1 - b) * self.delta_p[i] + b * losses[i] / sum(losses) for i in K]
        self.p = [self.p[i] + self.delta_p[i] for i in K]
        self.p = [x / sum(self.p) for x in self.p]
        self.delta_dot = [(1 - c) * self.delta_dot[i] + c * w[i] / w.sum() for i in K]
        self.p_dot = [self.p_dot[i] + self.delta_dot[i] for i in K]
        self.p_dot = [x / sum(self.p_dot) for x in self.p_dot]
        ratio = np.std(self.p, ddof=1) / (np.std(self.p, ddof=1) + np.std(self.p_dot, ddof=1))
        return [ratio * self.p[i] + (1 - ratio) * self.p_dot[i] for i in K]

    def tensor(self, rows, freq, rates):
        rows = [row.copy() for row in rows]
        if self.epoch == 0:
            return sum(f * row for f, row in zip(freq, rows, strict=True))
        means = []
        for row, rate in zip(rows, rates, strict=True):
            dropped = np.argsort(np.abs(row), kind="stable")[: int(len(row) * rate)]
            means.append(np.abs(row[dropped]).mean() if len(dropped) else np.nan)
            row[dropped] = 0
        unit = np.stack([row / np.linalg.norm(row) for row in rows])
        with np.errstate(invalid="ignore"):
            std = np.std(unit / np.linalg.norm(unit, axis=0), axis=0, ddof=1)
        g0 = sum(f * row for f, row in zip(freq, rows, strict=True))
        std = np.where(np.isnan(std), np.inf, std)
        order, count = np.argsort(std, kind="stable"), int(len(g0) * self.drop)
        agreed = order[:count][std[order[:count]] < std[order[count]] - 1e-9]  # all of those that are equal, or none
        if len(agreed) and np.mean(means) / np.abs(g0[agreed]).mean() < 1:
            g0[agreed] *= 1 + np.mean(means) / np.abs(g0[agreed]).mean()
        return g0


def rounds(clients, count, seed):
    """Updates that mostly agree, as the authors' weights need it, and losses that fall."""
    generator = torch.Generator().manual_seed(seed)
    for when in range(count):
        common = torch.randn(sum(SIZES), generator=generator, dtype=torch.float64)
        rows = torch.randn(clients, sum(SIZES), generator=generator, dtype=torch.float64) + 0.8 * common
        yield 0.8**when * rows, (0.5 + torch.rand(clients, generator=generator).double()) * 0.8**when


@pytest.mark.parametrize("clients", [3, 6])
@pytest.mark.parametrize("drop", [0.05, 0.3, 0.5])
@pytest.mark.parametrize("beta", [0.3, 0.6])
def test_rounds_of_all_clients_equal_the_authors_code(clients, drop, beta):
    rule, authors, grown = FedPW(drop, beta), Authors(clients, drop, beta), 0.0
    for when, (rows, losses) in enumerate(rounds(clients, 6, clients)):
        step = rule.aggregate(make_cohort(rows, losses, when=when))
        expected, weights = authors.step(rows.numpy(), losses.tolist())
        np.testing.assert_allclose(rule.report.weights.numpy(), weights, rtol=1e-9)
        np.testing.assert_allclose(step.numpy(), expected, rtol=1e-9, atol=1e-12)
        grown = max(grown, float((step / (rule.report.weights @ rows)).max()))
    assert grown > 1.001


def test_without_both_parts_it_is_the_plain_mean():
    rule = FedPW(0.0, 0.0)
    for when, (rows, losses) in enumerate(rounds(4, 3, 1)):
        cohort = make_cohort(rows, losses, when=when)
        torch.testing.assert_close(rule.aggregate(cohort), FedAvg("uniform").aggregate(cohort))


def test_a_client_against_the_others_gains_nothing_and_loses_no_more():
    """There its share of the products is negative, and its weight may be."""
    rows, authors, rule = random_rows(1, 4).expand(4, -1).clone(), Authors(4, 0.3, 0.3), FedPW()
    rows[3] = -rows[3]
    rule.aggregate(make_cohort(rows, torch.ones(4)))
    authors.step(rows.numpy(), [1.0] * 4)
    assert min(authors.p_dot) < -0.4
    torch.testing.assert_close(rule.report.weights, torch.tensor([1, 1, 1, 0]).double() / 3)


def test_updates_that_grow_do_not_turn_the_mean_around():
    """There the moving mean extrapolates as soon as products are 1 / beta times those of the first round."""
    rule, authors, common = FedPW(0.3, 0.5), Authors(3, 0.3, 0.5), random_rows(1, 3)
    for when, lengths in enumerate([[3.0, 1.0, 1.0], [10.0, 30.0, 30.0]]):
        rows = torch.tensor(lengths)[:, None] * common
        authors.step(rows.numpy(), [1.0, 1.0, 1.1])
        rule.aggregate(make_cohort(rows, [1.0, 1.0, 1.1], when=when))
    assert min(authors.p_dot) < 0
    assert (rule.report.weights > 0.2).all()


def test_absent_clients_keep_their_weights_and_new_ones_start_at_the_mean():
    rule = FedPW(0.0, 0.5)
    rows = random_rows(1, 5).expand(2, -1)  # products are equal, so losses decide
    rule.aggregate(make_cohort(rows, [1.0, 3.0], ids=[4, 5]))
    assert rule.report.scalars["fair_share"] == 1
    torch.testing.assert_close(rule.report.weights, torch.tensor([0.25, 0.75]).double())
    rule.aggregate(make_cohort(rows, [1.0, 1.0], ids=[5, 6], when=1))
    rate = 0.5 * 1 / 2  # the mean loss has fallen to half
    gains = torch.tensor([(1 - rate) * 0.5 * 0.75 + rate * 0.5, rate * 0.5])
    grown = torch.tensor([0.75, 0.5]) + gains
    weights = rule.q
    assert [weights[5], weights[6]] == pytest.approx((1.25 * grown / grown.sum()).tolist())
    assert weights[4] == pytest.approx(0.25)


def test_clients_with_small_losses_lose_more_of_their_updates():
    rule, rows = FedPW(0.4), random_rows(3, 6)
    for when in range(2):
        step = rule.aggregate(make_cohort(rows, [0.0, 1.0, 1.0], when=when))
    # All of the first one's update is left out: 1 / loss is all that counts.
    alone = rule.report.weights[1:] @ rows[1:]
    assert torch.equal(step != 0, alone != 0)
    ratio = step / alone
    assert float(ratio.min()) == pytest.approx(1)


def test_tensors_without_movement_stay():
    rows, rule = random_rows(4, 8), FedPW()
    rows[:, 30:42] = 0
    rows[2, :30] = 0
    for when in range(3):
        step = rule.aggregate(make_cohort(rows, when=when))
        assert step.isfinite().all()
        assert not step[30:42].any()
        assert step[:30].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_smallest_numbers_and_their_equals_are_marked(dtype):
    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(3, sum(SIZES), generator=generator).abs() * 4).to(dtype)
    values[1] = values[1].round()  # many are equal
    values[2, ::3] = torch.inf
    counts = torch.tensor([[0, 1, 50], [7, 12, 20], [30, 5, 49]])
    starts = (0, *np.cumsum(SIZES).tolist())
    found = smallest(values, counts, Columns.whole(sum(SIZES)), starts)
    for row, marks, count in zip(values, found, counts, strict=True):
        for part, marked, k in zip(row.split(SIZES), marks.split(SIZES), count.tolist(), strict=True):
            expected = part <= part.sort().values[k - 1] if k else torch.zeros_like(marked)
            assert torch.equal(marked, expected)
