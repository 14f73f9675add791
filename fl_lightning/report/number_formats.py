# SPDX-License-Identifier: Apache-2.0
"""Numbers and names as a report writes them."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite, isnan

from fl_lightning.report.repetitions import Estimate, Interval

STAGES = {"val": "validation", "test": "test"}


def notation(values: Iterable[float | None]) -> str:
    """The format of numbers that are read together, such as those of a column: all have as many digits."""
    largest = max((abs(value) for value in values if value is not None and isfinite(value)), default=0.0)
    if 0 < largest < 0.001 or largest >= 1e7:
        return ".2e"
    return ",.3f" if largest < 1e4 else ",.1f"


def number(value: float | None, form: str | None = None) -> str:
    """A number with as many digits as one wants to read; where others stand beside it, in the form of all."""
    return "-" if value is None or isnan(value) else format(value, notation([value]) if form is None else form)


def spread(value: Estimate, form: str, sign: str = " ± ") -> str:
    """A mean over repetitions, with the deviation if there are several."""
    return number(value.mean, form) + ("" if isnan(value.deviation) else f"{sign}{number(value.deviation, form)}")


def interval_words(value: Interval | None, form: str | None = None, sign: str = "") -> str:
    """A middle and half of the interval's width, if it has one; ``sign="+"`` writes that of positive numbers, too."""
    if value is None:
        return "-"
    middle, half = (number(part, form) for part in value)
    return f"{sign if value.middle >= 0 else ''}{middle}" + (f" ± {half}" if isfinite(value.half) else "")


def percent(share: float) -> str:
    """A share between 0 and 1."""
    return f"{100 * share:.1f} %"


def plural(count: int, word: str) -> str:
    """Such as ``"1 client"`` and ``"1,000 clients"``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def isolated(text: str) -> str:
    """A name that may be written from right to left, kept from turning the words around it."""
    return f"\u2068{text}\u2069"


def client_label(name: str) -> str:
    """A client's name; of one that has only a number, that it is a client."""
    return f"client {name}" if name.isdecimal() else name


def duration(seconds: float) -> str:
    """Such as ``"1 h 20 min"``, ``"3 min 10 s"`` or ``"4.2 s"``."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 10:
        return f"{minutes} min {rest} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def in_bytes(count: int) -> str:
    """Such as ``"40 bytes"`` or ``"1.5 MiB"``."""
    for unit, word in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {word}"
    return plural(count, "byte")


def shortened(text: str, most: int = 28) -> str:
    """A name for an axis or a sentence."""
    flat = " ".join(text.split()) or "(no name)"
    return flat if len(flat) <= most else f"{flat[: most - 1]}…"
