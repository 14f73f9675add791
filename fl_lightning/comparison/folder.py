# SPDX-License-Identifier: Apache-2.0
"""The folder of a comparison: one command works in it at a time, and all its runs are of one configuration."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fl_lightning.comparison.cost import Timing
from fl_lightning.comparison.fitted import write_text

_PATIENCE = 3.0
"""Seconds: the processes of a command that was killed end a moment later."""
_SHOWN = 6
_MISSING = "not given"


class Folder:
    """Where a comparison keeps its files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Keeps other commands out; where the system has no such locks, nothing does.

        Raises:
            RuntimeError: another command is at work here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:
            yield
            return
        with (self.path / "lock").open("w") as file:
            last = time.monotonic() + _PATIENCE
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() > last:
                        raise RuntimeError(f"another comparison is at work in {self.path}") from None
                    time.sleep(0.1)
            yield

    def check(self, configuration: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuses to mix runs of different configurations; parts that are new are added.

        Args:
            configuration: entries by name, part by part: the project, and each method.

        Raises:
            ValueError: an entry is another one than that of the runs in this folder.
        """
        file, new = self.path / "configuration.json", json.loads(json.dumps(configuration))
        old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        parts = [(part, old[part], new[part]) for part in new if part in old]
        changed = [
            f"{name} of {part} was {_short(was.get(name, _MISSING))} and is {_short(now.get(name, _MISSING))}"
            for part, was, now in parts
            for name in {**was, **now}
            if was.get(name, _MISSING) != now.get(name, _MISSING)
        ]
        if changed:
            more = f", and {len(changed) - _SHOWN} more entries" if len(changed) > _SHOWN else ""
            raise ValueError(
                f"{self.path} holds runs of another configuration: {', '.join(changed[:_SHOWN])}{more}. Take another "
                "folder, or delete this one"
            )
        write_text(file, json.dumps({**old, **new}, indent=1, sort_keys=True))

    def timings(self) -> dict[str, Timing]:
        """The timings kept here, by method."""
        file = self.path / "timings.json"
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return {method: Timing(**entries) for method, entries in found.items()}

    def keep_timings(self, timings: Mapping[str, Timing]) -> None:
        """Keeps timings, for when this comparison is resumed."""
        write_text(self.path / "timings.json", json.dumps({method: asdict(one) for method, one in timings.items()}))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
