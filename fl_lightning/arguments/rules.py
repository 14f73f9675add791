# SPDX-License-Identifier: Apache-2.0
"""What an annotation cannot say about an argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bounds:
    """The range of a number, or of all numbers in a sequence or mapping."""

    least: float = -math.inf  # allowed itself, as is most
    most: float = math.inf
    above: float = -math.inf  # the number is larger, and smaller than below
    below: float = math.inf
    finite: bool = True  # NaN and infinities are refused
    filled: bool = False  # an empty sequence is refused
    wording: str = ""  # in place of the usual words

    def words(self, integer: bool) -> str:
        """Such as ``"a number from 0 to below 1"``."""
        if self.wording:
            return self.wording
        kind = "an integer" if integer else "a number"
        open_end = self.most == self.below == math.inf
        if open_end and (self.above == 0 or (integer and self.least == 1)):
            return "a positive integer" if integer else "a positive, finite number"
        if open_end and self.least == self.above == -math.inf:
            return "a finite number" if self.finite and not integer else kind
        if self.above > -math.inf and self.below < math.inf:
            return f"{kind} strictly between {self.above:g} and {self.below:g}"
        low = f" above {self.above:g}" if self.above > -math.inf else ""
        low = f" from {self.least:g}" if self.least > -math.inf else low
        high = f" to below {self.below:g}" if self.below < math.inf else f" to {self.most:g}"
        high = f" and at most {self.most:g}" if self.above > -math.inf else high
        if open_end:
            return f"a finite number{low} on" if self.finite and not integer else f"{kind}{low} on"
        return f"{kind}{low}{high}"

    def admits(self, number: float) -> bool:
        """Whether a number is finite and lies in the range."""
        if isinstance(number, float) and not math.isfinite(number):
            return not self.finite and (math.isnan(number) or number > self.least)
        return self.least <= number <= self.most and self.above < number < self.below


@dataclass(frozen=True)
class Text:
    """What a string must be."""

    wanted: str
    admits: Callable[[str], bool]


@dataclass(frozen=True)
class Example:
    """How an object or a function is made, for errors."""

    text: str
    kind: str = ""  # in words, where the name of its class would not help


Rule = Bounds | Text | Example


def _names_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


ANY = Text("anything", lambda text: True)
"""The function checks the argument itself."""
FILLED = Bounds(filled=True)
"""A sequence has at least one entry."""
TEXT = Text("a string", lambda text: True)
"""A string may be empty."""
DEVICE = Text("the name of a torch device such as 'cpu'", _names_device)
