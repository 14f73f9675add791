# SPDX-License-Identifier: Apache-2.0
"""Gram matrices of every kind that a cohort can produce, and independent solvers to judge the answers by."""

from itertools import combinations, product

import numpy as np


def gram_of(vectors):
    return vectors @ vectors.swapaxes(-1, -2)


def families(rng, batch, k):
    """Named batches of Gram matrices ``[batch, k, k]``."""
    n = 3 * k

    def normal(*shape):
        return rng.standard_normal(shape)

    x, shared = normal(batch, k, n), normal(batch, 1, n)
    low = normal(batch, k, k // 2 + 1) @ normal(batch, k // 2 + 1, n)
    centres = np.take_along_axis(x, rng.integers(0, max(1, k // 3), (batch, k, 1)), 1)
    spread = 10.0 ** rng.uniform(-6, 0, (batch, k, 1))
    half = np.where(np.arange(k)[:, None] < k // 2, 1.0, -1.0)
    with_zero = x.copy()
    with_zero[:, rng.integers(k)] = 0
    fair = x.copy()
    fair[:, -1] = (rng.uniform(-1, 1, (batch, k - 1, 1)) * x[:, :-1]).sum(1)
    vectors = {
        "independent": x,
        "shared direction": x + shared,
        "rank deficient": low,
        "plane": normal(batch, k, 2) @ normal(batch, 2, n),
        "plane away from 0": normal(batch, k, 2) @ normal(batch, 2, n) + shared,
        "duplicates": centres,
        "near duplicates 1e-7": centres + 1e-7 * x,
        "near duplicates 1e-10": centres + shared + 1e-10 * x,
        "clusters at many distances": centres + 10.0 ** rng.uniform(-9, -1, (batch, k, 1)) * x,
        "nearly low rank": low + 1e-6 * x,
        "norms spread": x * spread,
        "norms spread, low rank": low * spread,
        "norms spread, clusters": (centres + 1e-6 * x) * spread,
        "opposed": half * x[:, np.arange(k) % max(1, k // 2)] + 0.01 * normal(batch, k, n),
        "opposed exactly": half * x[:, np.arange(k) % max(1, k // 2)],
        "opposed but for 1e-6": half * x[:, np.arange(k) % max(1, k // 2)] + 1e-6 * normal(batch, k, n),
        "opposed, norms spread": spread * half * x[:, np.arange(k) % max(1, k // 2)] * (1 + 1e-6 * normal(batch, k, 1)),
        "opposed groups": half * 0.01 * x + np.where(np.arange(k) % 2, 1.0, -1.0)[:, None] * shared,
        "fair row in the span": fair,
        "0 on the boundary": np.concatenate([x[:, :-1], -x[:, :-1].mean(1, keepdims=True)], 1),
        "a zero row": with_zero,
        "all zero": np.zeros_like(x),
        "all equal": np.repeat(x[:, :1], k, 1),
        "orthonormal": np.repeat(np.eye(k)[None], batch, 0),
        "small whole numbers": rng.integers(-2, 3, (batch, k, 3)).astype(float),
        "lognormal": np.exp(2 * x),
        "sparse": x * (rng.random(x.shape) < 0.1),
        "moment curve": (np.linspace(0.1, 1, k)[:, None] ** np.arange(1, 7)) * np.ones((batch, 1, 1)),
    }
    return {name: gram_of(rows) for name, rows in vectors.items()}


def objective(gram, lam):
    return np.einsum("...i,...ij,...j->...", lam, gram, lam)


def relative_gap(gram, lam):
    """KKT gap in units of the mean diagonal, computed apart from the package."""
    slope = np.einsum("...ij,...j->...i", gram, lam)
    mean = np.einsum("...ii->...", gram) / gram.shape[-1]
    return ((lam * slope).sum(-1) - slope.min(-1)) / np.where(mean > 0, mean, 1.0)


def enumerate_supports(gram):
    """Least objective over all supports: the affine minimiser of each, where it lies in the simplex."""
    k = len(gram)
    scale = np.trace(gram) / k or 1.0
    gram = gram / scale
    best = np.diagonal(gram).min()
    for size in range(2, k + 1):
        for support in combinations(range(k), size):
            part = gram[np.ix_(support, support)]
            first = part[0, 0]
            inner = part[1:, 1:] - part[1:, :1] - part[:1, 1:] + first
            tail = np.linalg.lstsq(inner, first - part[0, 1:], rcond=1e-13)[0]
            lam = np.concatenate([[1 - tail.sum()], tail])
            if lam.min() >= 0:
                best = min(best, lam @ part @ lam)
    return best * scale


def enumerate_faces(gram, lower, upper):
    """Least objective with bounds: the affine minimiser of each face, where it keeps to them."""
    k = len(gram)
    scale = np.trace(gram) / k or 1.0
    gram = gram / scale
    best = np.inf
    for face in product(*((0, 1, 2) if low < high else (0,) for low, high in zip(lower, upper, strict=True))):
        face = np.array(face)
        free = np.flatnonzero(face == 2)
        lam = np.where(face == 0, lower, upper)
        left = 1 - lam[face != 2].sum()
        if len(free) == 0 and abs(left) > 1e-12:
            continue
        if len(free):
            lam[free] = left / len(free)
            edges = np.eye(len(free))[1:] - np.eye(len(free))[:1]
            inner = edges @ gram[np.ix_(free, free)] @ edges.T
            lam[free] -= edges.T @ np.linalg.lstsq(inner, edges @ gram[free] @ lam, rcond=1e-13)[0]
        if (lam >= lower - 1e-12).all() and (lam <= upper + 1e-12).all():
            best = min(best, lam @ gram @ lam)
    return best * scale


def independent(gram, lower=0.0, upper=np.inf):
    """The same problem, with bounds if given, by an interior-point solver."""
    import clarabel
    from scipy import sparse

    k = len(gram)
    scale = np.trace(gram) / k or 1.0
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-12
    sides = np.isfinite(upper) * np.ones(k, dtype=bool)
    rows = sparse.csc_matrix(np.concatenate([np.ones((1, k)), -np.eye(k), np.eye(k)[sides]]))
    bounds = np.concatenate([[1.0], -lower * np.ones(k), (upper * np.ones(k))[sides]])
    cones = [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(k + int(sides.sum()))]
    upper_triangle = sparse.triu(sparse.csc_matrix(2 * gram / scale), format="csc")
    solution = clarabel.DefaultSolver(upper_triangle, np.zeros(k), rows, bounds, cones, settings).solve()
    lam = np.clip(np.array(solution.x), lower, upper)
    return objective(gram, lam / lam.sum())


def shortest_point(vectors):
    """Point of least norm of a convex hull, by trying every support; entries that are ``None`` do not count."""
    vectors = np.asarray([v for v in vectors if v is not None])
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
