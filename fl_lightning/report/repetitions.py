# SPDX-License-Identifier: Apache-2.0
"""How far numbers of several fits of one method vary, by what, and whether two methods differ by more than that.

Repetitions of one division of the data differ by their seeds alone. Those of several divisions are nested: each
division has its seeds. A difference between two methods is then one number per division, its mean over the seeds,
because what a division does to it is the same for all its seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev, variance
from typing import NamedTuple

_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Of Student's t at .975, with 1 to 10 degrees of freedom."""
_NORMAL = 1.959964


class Repetition(NamedTuple):
    """What a method is repeated with.

    Attributes:
        division: which division of the data among the clients; 0 is the project's own, and division ``d`` that of a
            seed of the data which is ``d`` larger.
        seed: of the module's first weights and of everything random in the fit.
    """

    division: int
    seed: int


@dataclass(frozen=True)
class Interval:
    """What repetitions say of a number, with 95 % confidence if it is distributed normally.

    Attributes:
        mean: its mean.
        half: half of the interval's width.
    """

    mean: float
    half: float


@dataclass(frozen=True)
class Variation:
    """How far the number of a single fit varies.

    Attributes:
        deviation: standard deviation over divisions and seeds.
        by_division: share of the variance that is the division's; ``None`` where repetitions cannot tell.
    """

    deviation: float
    by_division: float | None


def paired(numbers: Mapping[Repetition, float], reference: Mapping[Repetition, float]) -> Interval | None:
    """The difference to the reference, taken repetition by repetition: an interval of Student's t.

    Returns:
        The interval for another seed, or where there are several divisions for another division; ``None`` if both have
        fewer than two of them.
    """
    found: dict[int, list[float]] = {}
    for repetition in numbers.keys() & reference.keys():
        found.setdefault(repetition.division, []).append(numbers[repetition] - reference[repetition])
    units = [fmean(several) for several in found.values()] if len(found) > 1 else next(iter(found.values()), [])
    if len(units) < 2:
        return None
    return Interval(fmean(units), _quantile(len(units) - 1) * stdev(units) / sqrt(len(units)))


def mark(numbers: Mapping[Repetition, float], reference: Mapping[Repetition, float], larger_is_better: bool) -> str:
    """Whether a method differs from the reference.

    Returns:
        ``"+"`` for better, ``"-"`` for worse, and nothing where the interval of :func:`paired` has zero in it.
    """
    interval = paired(numbers, reference)
    if interval is None or abs(interval.mean) <= interval.half:
        return ""
    return "+" if (interval.mean > 0) == larger_is_better else "-"


def variation(numbers: Mapping[Repetition, float]) -> Variation | None:
    """Components of variance, by the analysis of a random effect (the division) with seeds nested in it.

    Returns:
        ``None`` with fewer than two numbers.
    """
    if len(numbers) < 2:
        return None
    divisions: dict[int, list[float]] = {}
    for repetition, number in numbers.items():
        divisions.setdefault(repetition.division, []).append(number)
    several = [found for found in divisions.values() if len(found) > 1]
    if len(divisions) < 2 or not several:
        return Variation(stdev(numbers.values()), None)
    freedom = sum(len(found) - 1 for found in several)
    within = sum(variance(found) * (len(found) - 1) for found in several) / freedom
    seeds = len(divisions) / sum(1 / len(found) for found in divisions.values())  # harmonic: runs may have failed
    between = max(0.0, variance(fmean(found) for found in divisions.values()) - within / seeds)
    total = between + within
    return Variation(sqrt(total), between / total if total else None)


def _quantile(freedom: int) -> float:
    """Student's t at .975; beyond the table by its expansion around the normal distribution, right to .001."""
    if freedom <= len(_QUANTILES):
        return _QUANTILES[freedom - 1]
    z = _NORMAL
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + (z**3 + z) / (4 * freedom) + second / freedom**2 + third / freedom**3
