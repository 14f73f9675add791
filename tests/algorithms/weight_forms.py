# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N806 (letters as in the papers)
"""Methods that weigh clients, once more: loops instead of tensors, no code of the package.

``step(rows, losses, ids, ...)`` takes a round and returns the old model minus the new one.
"""

from math import exp, log2

import numpy as np


def weighed(weights, rows):
    return sum(weight * np.asarray(row, dtype=float) for weight, row in zip(weights, rows, strict=True))


class QFedAvg:
    """Section 2.4."""

    def __init__(self, q):
        self.q = q

    def step(self, rows, losses, ids, eta, **more):
        top, bottom = 0.0, 0.0
        for row, F in zip(rows, losses, strict=True):
            F, g = F + 1e-10, row / eta
            top = top + F**self.q * g
            bottom += self.q * F ** (self.q - 1) * sum(x * x for x in g) + F**self.q * (1 / eta)
        return top / bottom


def nearest_on_simplex(y, total=1.0):
    """By bisection on the shift, where the package sorts."""
    low, high = min(y) - total, max(y)
    for _ in range(200):
        shift = (low + high) / 2
        if sum(max(v - shift, 0) for v in y) > total:
            low = shift
        else:
            high = shift
    return [max(v - (low + high) / 2, 0) for v in y]


class AFL:
    """Section 2.5; ``lambda`` by client, moved among participants only."""

    def __init__(self, gamma, clients):
        self.gamma, self.lam = gamma, dict.fromkeys(range(clients), 1 / clients)

    def step(self, rows, losses, ids, **more):
        mass = sum(self.lam[i] for i in ids)
        shares = [self.lam[i] / mass if mass else 1 / len(ids) for i in ids]
        moved = nearest_on_simplex([self.lam[i] + self.gamma * F for i, F in zip(ids, losses, strict=True)], mass)
        self.lam |= dict(zip(ids, moved, strict=True))
        return weighed(shares, rows)


class TERM:
    """Section 2.6; exponentials as they are, so only for small ``t F``."""

    def __init__(self, t, reading, rate=0.5):
        self.t, self.reading, self.rate = t, reading, rate
        self.R = 0.0 if reading == "code" else None

    def step(self, rows, losses, ids, **more):
        m = len(losses)
        offset = max(losses) if self.reading == "code" else 0.0
        a = [exp(self.t * (F - offset)) for F in losses]
        mean = sum(a) / m
        self.R = mean if self.R is None or self.reading == "library" else (1 - self.rate) * self.R + self.rate * mean
        if self.reading != "code":
            return weighed([a_i / (m * self.R) for a_i in a], rows)
        return weighed([a_i / (self.R * m) for a_i in a], rows) / m


class DRFL:
    """Section 2.8, with the factor m / N of the published code."""

    def step(self, rows, losses, ids, **more):
        p = [len(rows) / 100 * F for F in losses]
        return weighed([p_i / sum(p) for p_i in p], rows)


class FedGini:
    """Section 2.10, ranks by counting who has less."""

    def __init__(self, epsilon):
        self.epsilon = epsilon

    def step(self, rows, losses, ids, **more):
        m = len(losses)
        if m == 1:
            return rows[0]
        D = sum(k * (k + 1) for k in range(m))
        b = [1 + (1 - self.epsilon) * k * (k + 1) / D for k in range(m)]
        ranks = [sum(other < F for other in losses) for F in losses]
        return weighed([b[k] / sum(b) for k in ranks], rows)


class FedFa:
    """Section 2.9: intended weights, and the momentum of ``ms <- gamma ms + dw; w+ = w + ms``."""

    def __init__(self, beta, gamma):
        self.alpha, self.beta, self.gamma = 1 - beta, beta, gamma
        self.ms, self.f = 0.0, {}

    def step(self, rows, losses, ids, accuracies, **more):
        for i in ids:
            self.f[i] = self.f.get(i, 0) + 1
        f = [self.f[i] for i in ids]
        inform = [-log2(min(1.0, A / sum(accuracies) + 1e-6)) for A in accuracies]
        often = [-log2(min(1.0, 1 - count / sum(f) + 1e-6)) for count in f]
        if len(ids) == 1:
            inform = [1.0]
        p = [self.alpha * x / sum(inform) + self.beta * y / sum(often) for x, y in zip(inform, often, strict=True)]
        self.ms = self.gamma * self.ms - weighed(p, rows)
        return -self.ms


def compare(rule, form, cohorts, **more):
    """The rule and its form over the same rounds: equal within 1e-9 of the longest row."""
    rounds = 0
    for cohort in cohorts:
        rows = cohort.updates.rows.numpy()
        step = rule.aggregate(cohort).numpy()
        expected = form.step(
            rows,
            cohort.losses.tolist(),
            cohort.client_ids,
            eta=cohort.client_lr,
            accuracies=cohort.extras["accuracy"].tolist(),
        )
        longest = max(np.linalg.norm(row) for row in rows)
        assert np.linalg.norm(step - expected) <= 1e-9 * max(np.linalg.norm(expected), 1e-3 * longest)
        rounds += 1
    assert rounds > 0


class AAggFF:
    """The authors' server, with its vectors over all ``K`` clients, without its defects.

    There decisions start at ``C`` each, the estimate of a client's response lacks the mean, and the root of the rounds
    counts one more.
    """

    def __init__(self, setting, clients, cdf, minimise=None):
        self.setting, self.K, self.cdf, self.minimise = setting, clients, cdf, minimise
        self.p, self.g, self.t = None, np.zeros(clients), 0
        self.H = 4.0 * np.eye(clients)

    def step(self, rows, losses, ids, **more):
        ids, K = list(ids), self.K
        C = len(ids) / K
        self.t += 1
        if self.p is None:
            self.p = np.full(K, 1 / K)
        x = np.asarray(losses, dtype=float) / np.mean(losses)
        r = np.zeros(K)
        r[ids] = [self.cdf(value) for value in x]
        if self.setting == "silo":
            r[ids] = r[ids] / K
            grad = -r / (self.p @ r + 1)
            self.g = self.g + grad
            self.H = self.H + np.outer(grad, grad)
            self.p = self.minimise(4.0 * np.eye(K) + K / 4 * self.H, self.g)
        else:
            r[ids] = r[ids] * C
            mean = r[ids].mean()
            robust = np.full(K, mean)
            robust[ids] = (r[ids] - mean) / C + mean
            below = self.p.sum() * mean + 1
            first = -robust / below
            second = np.outer(np.ones(K), self.p) * mean @ (robust - mean) / below**2
            self.g = self.g + first + second
            scaled = -self.g * np.sqrt(np.log(K)) / np.sqrt(self.t) / (2 + C)
            self.p = np.exp(scaled - scaled.max())
            self.p = self.p / self.p.sum()
        return weighed(self.p[ids] / self.p[ids].sum(), rows)
