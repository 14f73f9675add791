# SPDX-License-Identifier: Apache-2.0
"""How far numbers of several fits of one method vary, by what, and whether two methods differ by more than that.

Repetitions of one division of the data differ by their seeds alone. Those of several divisions are nested: each
division has its seeds. A difference between two methods is then one number per division, its mean over the seeds,
because what a division does to it is the same for all its seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import cos, inf, nan, pi, sin, sqrt, tan
from statistics import fmean, stdev
from typing import NamedTuple


class Repetition(NamedTuple):
    """What a method is repeated with."""

    division: int  # 0 is the project's own; division d is that of a seed of the data which is d larger
    seed: int  # of the module's first weights and of everything random in the fit


@dataclass(frozen=True)
class Estimate:
    """A number over repetitions."""

    mean: float = nan  # NaN without any number
    deviation: float = nan  # standard deviation of a single repetition's number; NaN with one
    mark: str = ""  # of the difference to a reference, see mark()

    @classmethod
    def of(cls, numbers: Iterable[float], mark: str = "") -> Estimate:
        """From the number of each repetition."""
        found = list(numbers)
        return cls(fmean(found) if found else nan, stdev(found) if len(found) > 1 else nan, mark)


class Interval(NamedTuple):
    """Of Student's t, for the mean over other repetitions."""

    middle: float
    half: float  # of its width; infinite with one repetition, which says nothing about chance


def paired(numbers: Mapping[Repetition, float], reference: Mapping[Repetition, float]) -> Interval | None:
    """The :func:`interval` of the difference to the reference, taken repetition by repetition; ``None`` without any."""
    return interval({one: numbers[one] - reference[one] for one in numbers.keys() & reference.keys()})


def interval(numbers: Mapping[Repetition, float], level: float = 0.95) -> Interval | None:
    """Of a number over repetitions: for another seed, or where there are several divisions for another division."""
    found: dict[int, list[float]] = {}
    for repetition, number in numbers.items():
        found.setdefault(repetition.division, []).append(number)
    units = [fmean(several) for several in found.values()] if len(found) > 1 else next(iter(found.values()), [])
    if not units:
        return None
    if len(units) < 2:
        return Interval(units[0], inf)
    return Interval(fmean(units), student_quantile(level, len(units) - 1) * stdev(units) / sqrt(len(units)))


def mark(numbers: Mapping[Repetition, float], reference: Mapping[Repetition, float], larger_is_better: bool) -> str:
    """Better ``"+"``, worse ``"-"``, or nothing where the interval of :func:`paired` has zero in it."""
    found = paired(numbers, reference)
    if found is None or abs(found.middle) <= found.half:
        return ""
    return "+" if (found.middle > 0) == larger_is_better else "-"


def student_quantile(level: float, freedom: int) -> float:
    """What the size of Student's t stays below with this probability.

    By the finite sums for whole degrees of freedom, 26.7.3 and 26.7.4 of Abramowitz and Stegun, in the angle whose
    tangent is ``t / sqrt(freedom)``; halving finds the angle. More than 1,000 degrees count as 1,000.
    """
    freedom = min(freedom, 1000)
    low, high = 0.0, pi / 2
    while (angle := (low + high) / 2) not in (low, high):
        low, high = (angle, high) if _inside(angle, freedom) < level else (low, angle)
    return sqrt(freedom) * tan(low)


def _inside(angle: float, freedom: int) -> float:
    odd = freedom % 2
    term, total = 1.0, float(freedom > 1)
    for k in range(2 + odd, freedom, 2):
        term *= (k - 1) / k * cos(angle) ** 2
        total += term
    return 2 / pi * (angle + sin(angle) * cos(angle) * total) if odd else sin(angle) * total
