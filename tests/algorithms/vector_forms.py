# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N806 (letters as in the papers)
"""The same methods on float64 vectors, by brute force: no Gram matrices, no code of the package."""

from itertools import pairwise

import numpy as np
from qp_cases import shortest_point


def length_in(point, vectors):
    """Length in units of the root mean square of the vectors."""
    vectors = [v for v in vectors if v is not None]
    return np.linalg.norm(point) / np.sqrt(np.mean([v @ v for v in vectors])) if vectors else np.inf


def usual_length(vectors):
    """Median of the lengths that are not 0, the lower one of an even number."""
    lengths = sorted(np.linalg.norm(v) for v in vectors if np.any(v))
    return lengths[(len(lengths) - 1) // 2] if lengths else np.inf


class Remembered:
    """Independent bookkeeping of who was absent for how long."""

    def __init__(self, window):
        self.window, self.last = window, {}

    def absent(self, ids, t):
        names = {"ratio": len(self.last) / len(ids), "last": 1, "all": np.inf, "none": 0}
        tau = names.get(self.window, self.window)
        entries = [(-when, i, row) for i, (when, row) in self.last.items() if i not in ids and when >= t - tau]
        return [row for _, _, row in sorted(entries, key=lambda entry: entry[:2])]

    def store(self, cohort):
        for i, row in zip(cohort.client_ids, cohort.updates.rows, strict=True):
            self.last[i] = (cohort.round, row.numpy().astype(float))


def unit(vector):
    return vector / np.linalg.norm(vector)


def fedlf(rows, losses, remembered, starts, equalise=True, fair=True, merge=True, needed=False):
    """FedLF, Algorithm 1; ``remembered`` newest first. ``needed``: the fair row takes part only where it pays.

    Returns the step, the blocks, and the shortest direction of a block in units of its rows.
    """
    rows, m = np.asarray(rows), len(rows)
    F, one = np.asarray(losses, dtype=float), np.ones(m)
    q = None
    if fair and m > 1 and np.linalg.norm(F) > 0:
        norm = np.linalg.norm(F)
        q = (F @ one * F / (np.sqrt(m) * norm) - one * norm / np.sqrt(m)) / norm**2  # equation 5
        if np.linalg.norm(q) * norm <= 1e-6 or (needed and np.arccos(F @ one / norm / np.sqrt(m)) <= np.pi / 16):
            q = None

    def hull(block, with_fair, count):
        start, stop = block
        pieces = [r[start:stop] for r in [*rows, *remembered]]
        usual = usual_length(pieces[:m])
        alive = [np.linalg.norm(p) > 1e-8 * usual and i < m + count for i, p in enumerate(pieces)]
        if not any(alive[:m]):
            return None, []
        mean = np.mean([np.linalg.norm(p) for p, a in zip(pieces[:m], alive, strict=False) if a])
        vectors = [None if not a else mean * unit(p) if equalise else p for p, a in zip(pieces, alive, strict=True)]
        base = vectors[:m]
        if with_fair:
            g = sum(w * p for w, p in zip(q, base, strict=True) if p is not None)
            if equalise:
                too_short = np.linalg.norm(g) <= 1e-4 * np.linalg.norm(q) * mean
                g = None if too_short else mean * unit(g)
            vectors = [*vectors, g]
        return vectors, base

    lengths = []

    def solve(block, last=False):
        count, with_fair = len(remembered), q is not None
        fitting = max(0, min(count, block[1] - block[0] - m - with_fair))
        attempts = [(with_fair, count), (with_fair, fitting), (False, fitting)]
        attempts += [(with_fair, 0), (False, 0)] if last else []
        for attempt in attempts:
            vectors, base = hull(block, *attempt)
            if vectors is None:
                return np.zeros(block[1] - block[0])
            point = shortest_point(vectors)
            if needed and attempt[0]:
                plain, total = shortest_point(hull(block, False, attempt[1])[0]), rows[:, block[0] : block[1]].sum(0)
                found = length_in(point, base) > 1e-4
                if length_in(plain, base) > 1e-4 and not (found and unit(point) @ total >= 0.9 * (unit(plain) @ total)):
                    point = plain
            if length_in(point, base) > 1e-4:
                lengths.append(length_in(point, base))
                return point
        return None

    blocks = [(a, b) for a, b in pairwise(starts)]
    points = [solve(block) for block in blocks]
    while merge and len(blocks) > 1 and any(point is None for point in points):
        i = min(next(i for i, point in enumerate(points) if point is None), len(blocks) - 2)
        blocks[i : i + 2] = [(blocks[i][0], blocks[i + 1][1])]
        points[i : i + 2] = [solve(blocks[i])]
    points = [solve(b, last=True) if p is None else p for b, p in zip(blocks, points, strict=True)]
    d = np.concatenate([np.zeros(b - a) if p is None else p for (a, b), p in zip(blocks, points, strict=True)])
    step = d if not d.any() else unit(d) * np.linalg.norm(rows.mean(0))
    return step, blocks, min(lengths, default=0.0)


class FedMDFG:
    """FedMDFG, Algorithms 1 and 2, with gradients instead of rows."""

    def __init__(self, theta, s, beta):
        self.theta, self.s, self.beta = theta, s, beta
        self.old, self.reference, self.length, self.direction = {}, {}, None, None

    def step(self, gradients, losses, ids, t, eta, losses_at):
        usual = usual_length(gradients)
        live = [np.linalg.norm(v) > 1e-8 * usual for v in gradients]
        mu = np.mean([np.linalg.norm(v) for v, a in zip(gradients, live, strict=True) if a])
        g = [mu * unit(v) if a else None for v, a in zip(gradients, live, strict=True)]
        there = {i: v for i, v in zip(ids, g, strict=True) if v is not None}
        F, G = np.asarray(losses)[live], np.stack(list(there.values()))
        one = np.ones(len(F))
        angle = lambda a: np.arccos(min(1.0, a @ one / np.linalg.norm(a) / np.sqrt(len(a))))  # noqa: E731
        h = None
        worse = any(loss > self.reference.get(i, np.inf) for i, loss in zip(there, F, strict=True))
        if len(F) > 1 and (angle(F) > self.theta or worse):
            h = unit(one @ F / (F @ F) * F - one)
        absent = [self.old[i] for i in sorted(set(self.old) - set(ids))]
        for old in (absent, [None] * len(absent)):
            for fair in [h, None] if h is not None else [None]:
                Q = [*g, *old] + ([] if fair is None else [fair @ G])
                d = shortest_point(Q)
                self.direction = length_in(d, g)
                if self.direction > 1e-4:
                    break
            else:
                continue
            break
        sigma = np.linalg.norm(G.mean(0)) / np.linalg.norm(d)
        d = sigma * d
        a, tried = (eta if absent else 2**self.s * eta), []
        chosen = None
        while a >= (1 - 1e-6) * 2.0**-self.s * eta / sigma:  # whatever the rounding of sigma
            new = np.asarray(losses_at(a * d))[live]
            tried.append((a, new.sum()))
            if all(F - new >= self.beta * a * (G @ d)) and (fair is None or angle(new) < angle(F)):
                chosen = a
                break
            a /= 2
        if chosen is None:
            lower = [a for a, total in tried if total < F.sum()]
            chosen = max(lower) if lower else min(tried, key=lambda pair: pair[1])[0]
        for i, loss in zip(there, F, strict=True):
            known = self.reference.setdefault(i, loss)
            if loss < known:
                self.reference[i] = (t * known + loss) / (t + 1)
        self.old, self.length = there, chosen
        return chosen * d


class FedFV:
    """FedFV, Algorithms 1 to 3; ``window="reference"`` is that of the authors' later code."""

    def __init__(self, alpha, tau, window="absent", eps=0.0, reordered=list):
        self.alpha, self.tau, self.window, self.eps, self.reordered = alpha, tau, window, eps, reordered
        self.last = {}

    def step(self, updates, losses, ids, t):
        m = len(updates)
        order = sorted(range(m), key=lambda i: losses[i])
        kept = order[int(np.ceil((m - 1) * (1 - self.alpha))) :] if self.alpha > 0 else []
        order = self.reordered(order)
        projected = []
        for i in range(m):
            p = updates[i].copy()
            for j in order if i not in kept else []:
                if j != i and p @ updates[j] < 0:
                    p -= p @ updates[j] / (updates[j] @ updates[j] + self.eps) * updates[j]
            projected.append(p)
        g = sum(projected) / m
        old, self.last = self.last, self.last | {i: (t, u) for i, u in zip(ids, updates, strict=True)}
        if self.tau and t >= self.tau:
            shift = self.window == "reference"
            for k in range(t - self.tau + shift, t + shift):
                source = self.last if shift else {i: entry for i, entry in old.items() if i not in ids}
                rows = [u for when, u in source.values() if when == k]
                # An inner product that only rounding makes negative is no conflict.
                size = sum(np.linalg.norm(u) for u in updates)
                rows = [u for u in rows if u @ g < -1e-14 * np.linalg.norm(u) * size]
                if rows:
                    c = sum(rows)
                    g = g - g @ c / (c @ c + self.eps) * c
        self.length = length_in(g, updates)
        if self.length <= 1e-4:
            return 0 * g
        return g / (np.linalg.norm(g) + self.eps) * np.linalg.norm(np.mean(updates, axis=0))


def fedmgda(updates, lam, eta):
    """FedMGDA+ for given weights; clients whose update is zero have none."""
    units = [unit(u) if np.linalg.norm(u) > 0 else 0 * u for u in updates]
    return eta * sum(w * v for w, v in zip(lam, units, strict=True))
