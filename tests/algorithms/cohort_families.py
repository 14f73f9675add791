# SPDX-License-Identifier: Apache-2.0
"""Rounds of every kind that a federation can produce, for comparing Gram forms with vector forms."""

import torch
from algorithm_cohorts import SIZES, make_cohort

from fl_lightning.core.layout import ParamLayout

LAYOUT = ParamLayout.from_sizes(SIZES)


def _normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _opposed(g, m, n):
    half = _normal(g, m, n)
    half[m // 2 :] = -half[: m - m // 2] + 0.2 * _normal(g, m - m // 2, n)
    return half


def _zero_row(g, m, n):
    rows = _normal(g, m, n)
    if m > 1:
        rows[int(torch.randint(m, (), generator=g))] = 0
    return rows


def _duplicated(g, m, n):
    return _normal(g, max(1, m // 2), n)[torch.arange(m) // 2 % max(1, m // 2)]


FAMILIES = {
    "random": _normal,
    "correlated": lambda g, m, n: _normal(g, m, n) + 2 * _normal(g, n),
    "opposed": _opposed,
    "duplicated": _duplicated,
    "nearly duplicated": lambda g, m, n: _duplicated(g, m, n) + 0.03 * _normal(g, m, n),
    "rank-deficient": lambda g, m, n: _normal(g, m, 2) @ _normal(g, 2, n) + _normal(g, n),
    "norms spread": lambda g, m, n: _normal(g, m, n) * 10.0 ** (2 * torch.rand(m, 1, generator=g) - 1),
    "zero row": _zero_row,
}


def rounds_of(family, m, seed, rounds, clients, scale=1.0, layout=LAYOUT, **more):
    """Cohorts of ``m`` clients out of ``clients``, so that later ones have absent clients if ``m < clients``."""
    generator = torch.Generator().manual_seed(seed)
    for when in range(rounds):
        ids = torch.randperm(clients, generator=generator)[:m].tolist()
        losses = torch.rand(m, generator=generator, dtype=torch.float64) + 0.2
        rows = scale * FAMILIES[family](generator, m, layout.numel)
        yield make_cohort(rows, losses, ids, when, layout, **more)
