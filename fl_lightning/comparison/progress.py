# SPDX-License-Identifier: Apache-2.0
"""Shows how far a comparison is, and how long it will go on."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from tqdm import tqdm

from fl_lightning.comparison.cost import Timing, duration
from fl_lightning.comparison.plan import Run

_UNKNOWN = 1.0  # seconds


class Progress:
    """A line per finished run, and in a terminal a bar over the estimated seconds of all runs below them."""

    def __init__(self, runs: int, left: Sequence[Run], later: Sequence[str], timings: Mapping[str, Timing]) -> None:
        known = max([timing.seconds for timing in timings.values()], default=_UNKNOWN)
        seconds = {method: timing.seconds for method, timing in timings.items()}
        self._runs, self._over, self._timings = runs, runs - len(left) - len(later), timings
        self._open = {run: seconds.get(run.method, known) for run in left}
        self._later = sum(seconds.get(method, known) for method in later)
        self._total, self._began = sum(self._open.values()) + self._later, time.perf_counter()
        self._bar = tqdm(total=1.0, file=sys.stderr, disable=None, bar_format="{percentage:3.0f}%|{bar:40}| {desc}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def told(self, run: Run) -> None:
        """A round of a run is over."""
        step = self._timings[run.method].step_seconds if run.method in self._timings else 0.0
        self._open[run] = max(0.0, self._open[run] - step)
        self._show()

    def finished(self, run: Run, seconds: float, words: str) -> None:
        """A run is over."""
        self._over += 1
        del self._open[run]
        took = f" ({duration(seconds)})" if seconds else ""
        left = f"; about {self._left()} left" if self._open or self._later else ""
        self._bar.write(f"[{self._over}/{self._runs}] {run}: {words}{took}{left}", file=sys.stderr)
        self._show()

    def _left(self) -> str:
        """By how long what is done took, compared with its estimate."""
        left = sum(self._open.values()) + self._later
        done = self._total - left
        return duration(left * (time.perf_counter() - self._began) / done) if done else "?"

    def _show(self) -> None:
        left = sum(self._open.values()) + self._later
        self._bar.n = min(1.0, 1.0 - left / self._total)
        self._bar.set_description_str(f"{self._over} of {self._runs} runs, about {self._left()} left", refresh=False)
        self._bar.refresh()
