# SPDX-License-Identifier: Apache-2.0
"""Times of rounds that take turns, and what can be said about their median."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lightning as L


@dataclass(frozen=True)
class Median:
    """A median with its interval.

    Attributes:
        value: the median.
        low: lower end of an interval that covers the true median with at least 95 %, whatever the distribution.
        high: its upper end.
        count: how many numbers.
    """

    value: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Median:
        """Of one number or more; with fewer than six the interval is their range."""
        ordered = sorted(values)
        n = len(ordered)
        # The number of values below the true median is binomial(n, 1/2): leave out k at either end while both tails
        # together stay below 5 %.
        tail, k = 0.0, 0
        while k < n // 2:
            tail += math.comb(n, k) / 2**n
            if 2 * tail > 0.05:
                break
            k += 1
        first = max(k - 1, 0)
        return Median(statistics.median(ordered), ordered[first], ordered[n - 1 - first], n)

    def text(self, digits: int = 3) -> str:
        """The median and its interval."""
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True)
class Moment:
    """Seconds of this process on the processor, seconds on the wall, and page faults of this process."""

    cpu: float
    wall: float
    faults: int

    @staticmethod
    def now() -> Moment:
        """Reads all three."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return Moment(time.process_time(), time.perf_counter(), faults)

    def __sub__(self, other: Moment) -> Moment:
        return Moment(self.cpu - other.cpu, self.wall - other.wall, self.faults - other.faults)


class Turns(L.Callback):
    """Times a round of the running fit, then a round of each of some other things.

    Args:
        others: run the other rounds.
        warm_up: rounds that do not count.
    """

    def __init__(self, others: Sequence[Callable[[], None]], warm_up: int) -> None:
        self._others, self._warm_up = others, warm_up
        self._ours: list[Moment] = []
        self._theirs: list[list[Moment]] = [[] for _ in others]
        self._mark = Moment.now()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The first round begins."""
        self._mark = Moment.now()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A round of ours is over, from the end of the last one: loops, logging and server step included."""
        ended, self._mark = self._mark, Moment.now()
        self._ours.append(self._mark - ended)
        for other, moments in zip(self._others, self._theirs, strict=True):
            began = self._mark
            other()
            self._mark = Moment.now()
            moments.append(self._mark - began)

    @property
    def ours(self) -> list[Moment]:
        """Rounds of the fit."""
        return self._ours[self._warm_up :]

    @property
    def theirs(self) -> list[list[Moment]]:
        """The other rounds, in the order of what runs them."""
        return [moments[self._warm_up :] for moments in self._theirs]
