# SPDX-License-Identifier: Apache-2.0
"""How far numbers of several fits of one method vary, by what, and whether two methods differ by more than that.

Repetitions of one division of the data differ by their seeds alone. Those of several divisions are nested: each
division has its seeds. A difference between two methods is then one number per division, its mean over the seeds,
because what a division does to it is the same for all its seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt
from statistics import NormalDist, fmean, stdev, variance
from typing import NamedTuple

_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Of Student's t at .975, with 1 to 10 degrees of freedom."""


class Repetition(NamedTuple):
    """What a method is repeated with."""

    division: int  # 0 is the project's own; division d is that of a seed of the data which is d larger
    seed: int  # of the module's first weights and of everything random in the fit


class Spread(NamedTuple):
    """A number over repetitions."""

    mean: float
    deviation: float | None = None

    @classmethod
    def of(cls, numbers: Iterable[float | None]) -> Spread | None:
        """``None`` without any number."""
        found = [number for number in numbers if number is not None]
        return cls(fmean(found), stdev(found) if len(found) > 1 else None) if found else None


def paired(numbers: Mapping[Repetition, float], reference: Mapping[Repetition, float]) -> tuple[float, float] | None:
    """The difference to the reference, taken repetition by repetition, as a 95 % interval of Student's t.

    Middle and half of the width of the interval for another seed, or where there are several divisions for another
    division; ``None`` if both have fewer than two of them.
    """
    found: dict[int, list[float]] = {}
    for repetition in numbers.keys() & reference.keys():
        found.setdefault(repetition.division, []).append(numbers[repetition] - reference[repetition])
    units = [fmean(several) for several in found.values()] if len(found) > 1 else next(iter(found.values()), [])
    if len(units) < 2:
        return None
    return fmean(units), _quantile(len(units) - 1) * stdev(units) / sqrt(len(units))


def mark(numbers: Mapping[Repetition, float], reference: Mapping[Repetition, float], larger_is_better: bool) -> str:
    """Better ``"+"``, worse ``"-"``, or nothing where the interval of :func:`paired` has zero in it."""
    interval = paired(numbers, reference)
    if interval is None or abs(interval[0]) <= interval[1]:
        return ""
    return "+" if (interval[0] > 0) == larger_is_better else "-"


def division_share(numbers: Mapping[Repetition, float]) -> float | None:
    """The share of the numbers' variance that is the division's, by an analysis of variance with seeds nested in it.

    ``None`` without several divisions and several seeds of one of them.
    """
    divisions: dict[int, list[float]] = {}
    for repetition, value in numbers.items():
        divisions.setdefault(repetition.division, []).append(value)
    several = [found for found in divisions.values() if len(found) > 1]
    if len(divisions) < 2 or not several:
        return None
    within = sum(variance(found) * (len(found) - 1) for found in several) / sum(len(found) - 1 for found in several)
    seeds = len(divisions) / sum(1 / len(found) for found in divisions.values())  # harmonic: runs may have failed
    between = max(0.0, variance(fmean(found) for found in divisions.values()) - within / seeds)
    return between / (between + within) if between + within else None


def _quantile(freedom: int) -> float:
    """Student's t at .975; beyond the table by its expansion around the normal distribution, right to .001."""
    if freedom <= len(_QUANTILES):
        return _QUANTILES[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + (z**3 + z) / (4 * freedom) + second / freedom**2 + third / freedom**3
