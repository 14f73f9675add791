# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N806 (letters as in the papers)
"""The same methods on float64 vectors, by brute force: no Gram matrices, no code of the package."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np


def shortest_point(vectors):
    """Point of least norm of a convex hull, by trying every support."""
    vectors = np.asarray(vectors)
    best = None
    for size in range(1, len(vectors) + 1):
        for support in combinations(range(len(vectors)), size):
            chosen = vectors[list(support)]
            edges = (chosen[1:] - chosen[0]).T
            tail = np.linalg.lstsq(edges, -chosen[0], rcond=1e-12)[0] if size > 1 else np.zeros(0)
            lam = np.concatenate([[1 - tail.sum()], tail])
            if lam.min() < -1e-9:
                continue
            point = lam @ chosen
            if best is None or point @ point < best @ best * (1 - 1e-12):
                best = point
    return best


def is_zero(point, vectors):
    return point @ point <= 1e-8 * np.mean([v @ v for v in vectors])


def fedlf(rows, losses, remembered, starts, equalise=True, fair=True, merge=True):
    """Section 2.15 in vector space; ``remembered`` newest first. Returns step and blocks."""
    rows, m = np.asarray(rows), len(rows)
    F, one = np.asarray(losses, dtype=float), np.ones(m)
    q = None
    if fair and m > 1 and np.linalg.norm(F) > 0:
        norm = np.linalg.norm(F)
        q = (F @ one * F / (np.sqrt(m) * norm) - one * norm / np.sqrt(m)) / norm**2  # equation 5
        if np.linalg.norm(q) * norm <= 1e-6:
            q = None

    def hull(block, with_fair, count):
        start, stop = block
        pieces = [r[start:stop] for r in rows]
        longest = max(np.linalg.norm(p) for p in pieces)
        alive = [np.linalg.norm(p) > 1e-8 * longest for p in pieces]
        mean = np.mean([np.linalg.norm(p) for p, a in zip(pieces, alive, strict=True) if a])
        if equalise:
            pieces = [p * mean / np.linalg.norm(p) if a else 0 * p for p, a in zip(pieces, alive, strict=True)]
        vectors = [p for p, a in zip(pieces, alive, strict=True) if a]
        base = list(vectors)
        if with_fair:
            g = sum(w * p for w, p in zip(q, pieces, strict=True))
            if equalise:
                g = g * mean / np.linalg.norm(g)
            vectors.append(g)
        for old in remembered[:count]:
            piece = old[start:stop]
            vectors.append(piece * mean / np.linalg.norm(piece) if equalise else piece)
        return vectors, base

    def solve(block, last=False):
        count, with_fair = len(remembered), q is not None
        fitting = max(0, min(count, block[1] - block[0] - m - with_fair))
        attempts = [(with_fair, count), (with_fair, fitting), (False, fitting)]
        attempts += [(with_fair, 0), (False, 0)] if last else []
        for attempt in attempts:
            vectors, base = hull(block, *attempt)
            point = shortest_point(vectors)
            if not is_zero(point, base):
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
    if not d.any():
        return d, blocks
    return d / np.linalg.norm(d) * np.linalg.norm(rows.mean(0)), blocks


class FedMDFG:
    """Section 2.14 in vector space, with gradients instead of rows."""

    def __init__(self, theta, s, beta):
        self.theta, self.s, self.beta = theta, s, beta
        self.old, self.reference, self.length = {}, {}, None

    def step(self, gradients, losses, ids, t, eta, losses_at):
        g = {i: np.asarray(v) for i, v in zip(ids, gradients, strict=True) if np.linalg.norm(v) > 0}
        F = np.array([f for i, f in zip(ids, losses, strict=True) if i in g])
        mu = np.mean([np.linalg.norm(v) for v in g.values()])
        g = {i: v / np.linalg.norm(v) * mu for i, v in g.items()}
        G, one = np.stack(list(g.values())), np.ones(len(g))
        angle = lambda a: np.arccos(min(1.0, a @ one / np.linalg.norm(a) / np.sqrt(len(a))))  # noqa: E731
        Q, f = list(G), True
        if angle(F) > self.theta or any(loss > self.reference.get(i, np.inf) for i, loss in zip(g, F, strict=True)):
            h = one @ F / (F @ F) * F - one
            h /= np.linalg.norm(h)
            Q.append(h @ G)
            f = False
        absent = [i for i in self.old if i not in ids]
        Q += [self.old[i] for i in absent]
        d = shortest_point(Q)
        sigma = np.linalg.norm(G.mean(0)) / np.linalg.norm(d)
        d = sigma * d
        a, tried = (eta if absent else 2**self.s * eta), []
        chosen = None
        while a >= 2.0**-self.s * eta / sigma:
            new = np.asarray(losses_at(a * d))
            tried.append((a, new.sum()))
            if all(F - new >= self.beta * a * (G @ d)) and (f or angle(new) < angle(F)):
                chosen = a
                break
            a /= 2
        if chosen is None:
            lower = [a for a, total in tried if total < F.sum()]
            chosen = max(lower) if lower else min(tried, key=lambda pair: pair[1])[0]
        for i, loss in zip(g, F, strict=True):
            known = self.reference.setdefault(i, loss)
            if loss < known:
                self.reference[i] = (t * known + loss) / (t + 1)
        self.old, self.length = g, chosen
        return chosen * d
