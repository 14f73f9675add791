# SPDX-License-Identifier: Apache-2.0
"""Turns on disk: one line each, written when it is over, so that a run that was killed goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._peers.race import Lap


class Records:
    """The turns of a run.

    Args:
        path: the file; a last line that was cut off is removed.
        settings: under which turns are comparable.

    Attributes:
        turns: by shape and race, in the order of time; each has one lap per side.
        dropped: sentences about sides that dropped out.

    Raises:
        ValueError: the file was written under other settings; names the first difference.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self.turns: dict[tuple[str, str], list[dict[str, Lap]]] = {}
        self.dropped: list[str] = []
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole)
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines:
            self._write({"settings": dict(settings)})
        for line in lines:
            if "settings" in line:
                _check(line["settings"], settings, path)
            elif "dropped" in line:
                self.dropped.append(line["dropped"])
            else:
                laps = {name: Lap(**lap) for name, lap in line["laps"].items()}
                self.turns.setdefault((line["shape"], line["race"]), []).append(laps)

    def add(self, shape: str, race: str, laps: Mapping[str, Lap]) -> None:
        """Writes a turn."""
        self._write({"shape": shape, "race": race, "laps": {name: asdict(lap) for name, lap in laps.items()}})
        self.turns.setdefault((shape, race), []).append(dict(laps))

    def drop(self, sentence: str) -> None:
        """Writes down that a side has dropped out."""
        self._write({"dropped": sentence})
        self.dropped.append(sentence)

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _check(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"{path} must have been written under the same settings to go on with it, found {name} "
                f"{found.get(name)!r} in place of {wanted.get(name)!r}: choose another --name"
            )
