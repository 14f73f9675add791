# SPDX-License-Identifier: Apache-2.0
"""Numbers and names as a report writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

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
    def of(cls, numbers: Sequence[float | None]) -> Spread | None:
        """``None`` without any number."""
        found = [number for number in numbers if number is not None]
        return cls(fmean(found), stdev(found) if len(found) > 1 else None) if found else None


def number(value: float | None) -> str:
    """A number with as many digits as one wants to read."""
    if value is None:
        return "-"
    size = abs(value)
    if size != 0 and (size < 0.001 or size >= 1e7):
        return f"{value:.2e}"
    return f"{value:.3f}" if size < 10 else f"{value:,.1f}" if size < 1000 else f"{value:,.0f}"


def spread(value: Spread | None) -> str:
    """A mean over seeds, with the deviation if there are several."""
    if value is None:
        return "-"
    return number(value.mean) if value.deviation is None else f"{number(value.mean)} ± {number(value.deviation)}"


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
