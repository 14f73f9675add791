# SPDX-License-Identifier: Apache-2.0
"""Paired bootstrap intervals: how far a difference between two methods may be a matter of clients and seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Statistic = Callable[[Values], Values]
"""``[..., S, N]`` values of seeds and clients to ``[...]`` numbers."""

DRAWS, LEVEL, SEED = 2000, 0.95, 0


def mean(values: Values) -> Values:
    """Over seeds and clients."""
    return np.asarray(values.mean((-2, -1)))


def worst_tenth(values: Values) -> Values:
    """Mean over the worst tenth of the clients, at least one, of every seed; mean over the seeds."""
    count = max(1, round(0.1 * values.shape[-1]))
    return np.asarray(np.sort(values, -1)[..., :count].mean((-2, -1)))


class Interval(NamedTuple):
    """A difference, and the interval that holds it."""

    difference: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        """Whether the interval holds 0."""
        return bool(self.low <= 0 <= self.high)


def difference(
    ours: Values, reference: Values, statistic: Statistic, draws: int = DRAWS, level: float = LEVEL, seed: int = SEED
) -> Interval:
    """The difference of a statistic, with its percentile interval.

    A draw takes as many seeds and as many clients as there are, with replacement, and the same ones of both methods:
    what the two have in common cancels. Clients that lack a value in one of them are left out.

    Args:
        ours: ``[S, N]``, larger is better; NaN for a client without a value.
        reference: ``[S, N]`` of the same seeds and clients.
        statistic: of the values of a draw.
        draws: how many.
        level: share of the draws within the interval.
        seed: of the draws.

    Raises:
        ValueError: the two have different shapes, or no client has all values.
    """
    if ours.shape != reference.shape or ours.ndim != 2:
        raise ValueError(f"ours and reference must be [seeds, clients] alike, found {ours.shape}, {reference.shape}")
    known = ~np.isnan(ours + reference).any(0)
    if not known.any():
        raise ValueError("a client must have all its values, found none")
    pair = np.stack([ours[:, known], reference[:, known]])
    generator = np.random.default_rng(seed)
    _, rows, columns = pair.shape
    seeds = generator.integers(rows, size=(draws, rows, 1))
    clients = generator.integers(columns, size=(draws, 1, columns))
    places = seeds * columns + clients  # one flat index each, several times as fast as two
    drawn = [statistic(values.ravel().take(places)) for values in pair]
    low, high = np.quantile(drawn[0] - drawn[1], [(1 - level) / 2, (1 + level) / 2])
    found = statistic(pair)
    return Interval(float(found[0] - found[1]), float(low), float(high))
