# SPDX-License-Identifier: Apache-2.0
"""A small fault in one source file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

CHANGED = re.compile("«(.*?)→(.*?)»", re.DOTALL)


class NoLongerAppliesError(Exception):
    """The text that a change replaces is no longer in its file."""


@dataclass(frozen=True)
class Change:
    """A text that a file holds, with the change at its place: ``lam * «(v - w)→(w - v)»``.

    Attributes:
        occurrence: which one in the file, counted from 0.
    """

    file: str
    text: str
    occurrence: int = field(default=0, kw_only=True)

    @property
    def old(self) -> str:
        """The text before the change."""
        return CHANGED.sub(r"\1", self.text)

    @property
    def new(self) -> str:
        """The text after it."""
        return CHANGED.sub(r"\2", self.text)

    def apply(self, root: Path) -> str:
        """Changes the file below a folder, and returns its text of before.

        Raises:
            NoLongerAppliesError: there are fewer occurrences, or no such file.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        parts, at = text.split(self.old), self.occurrence + 1
        if len(parts) <= at:
            raise NoLongerAppliesError(f"{self.file} no longer holds {self.old!r} {at} times")
        path.write_text(self.old.join(parts[:at]) + self.new + self.old.join(parts[at:]), encoding="utf-8")
        return text


@dataclass(frozen=True)
class Mutation(Change):
    """A change that some test must notice.

    Attributes:
        meaning: what goes wrong, in a few words.
        tests: what pytest runs to notice it.
        rebuilt: of csrc/cuda, the source that is compiled anew.
        unseen: why no test can notice it, if so.
    """

    meaning: str
    tests: str
    rebuilt: str = ""
    unseen: str = ""

    @property
    def name(self) -> str:
        """Tells it from all others."""
        return f"`{self.file}` | {self.meaning}"


@dataclass(frozen=True)
class In:
    """Makes mutations of one file that the same tests decide."""

    file: str
    tests: str
    rebuilt: str = ""

    def __call__(self, meaning: str, change: str, occurrence: int = 0, unseen: str = "") -> Mutation:
        """One of them."""
        return Mutation(self.file, change, meaning, self.tests, self.rebuilt, unseen, occurrence=occurrence)
