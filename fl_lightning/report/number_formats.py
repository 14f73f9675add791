# SPDX-License-Identifier: Apache-2.0
"""Numbers and names as a report writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, stdev

from fl_lightning.report.repetitions import Repetition, variation

STAGES = {"val": "validation", "test": "test"}


@dataclass(frozen=True)
class Spread:
    """A number over seeds.

    Attributes:
        mean: over the seeds.
        deviation: sample standard deviation; ``None`` for one seed.
    """

    mean: float
    deviation: float | None = None

    @classmethod
    def over(cls, numbers: Mapping[Repetition, float]) -> Spread | None:
        """The mean over repetitions, and how far a single one varies; ``None`` without any number."""
        varies = variation(numbers)
        return cls(fmean(numbers.values()), None if varies is None else varies.deviation) if numbers else None

    @classmethod
    def of(cls, numbers: Sequence[float | None]) -> Spread | None:
        """``None`` without any number."""
        found = [number for number in numbers if number is not None]
        return cls(fmean(found), stdev(found) if len(found) > 1 else None) if found else None


def notation(values: Iterable[float | None]) -> str:
    """The format of numbers that are read together, such as those of a column: all have as many digits."""
    largest = max((abs(value) for value in values if value is not None and isfinite(value)), default=0.0)
    if 0 < largest < 0.001 or largest >= 1e7:
        return ".2e"
    return ",.3f" if largest < 1e4 else ",.1f"


def number(value: float | None, form: str | None = None) -> str:
    """A number with as many digits as one wants to read.

    Args:
        value: the number.
        form: of :func:`notation`, where others stand beside it.
    """
    return "-" if value is None else format(value, notation([value]) if form is None else form)


def spread(value: Spread | None, form: str) -> str:
    """A mean over seeds, with the deviation if there are several."""
    if value is None:
        return "-"
    mean = number(value.mean, form)
    return mean if value.deviation is None else f"{mean} ± {number(value.deviation, form)}"


def percent(share: float) -> str:
    """A share between 0 and 1."""
    return f"{100 * share:.1f} %"


def plural(count: int, word: str) -> str:
    """Such as ``"1 client"`` and ``"1,000 clients"``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def isolated(text: str) -> str:
    """A name that may be written from right to left, kept from turning the words around it."""
    return f"\u2068{text}\u2069"


def client_label(name: str, client_id: int) -> str:
    """A client's name; of one that has only its number, that it is a client."""
    return f"client {name}" if name == str(client_id) else name


def seconds(value: float) -> str:
    """A duration."""
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def shortened(text: str, most: int = 28) -> str:
    """A name for an axis or a sentence."""
    flat = " ".join(text.split()) or "(no name)"
    return flat if len(flat) <= most else f"{flat[: most - 1]}…"
