# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing: an op, torch by hand and a plain read take turns, so that they share whatever else goes on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

FEWEST, MOST = 5, 201
FEWEST_BY_HAND, LONG = 3, 1.0  # a call that takes longer, in seconds, is timed once
QUEUEING = 2_000_000  # clock cycles of a GPU, about 1 ms: longer than the host takes to queue an op


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time of one call: the processor's if there is one thread, by the clock if there are several.

    Other programs take the clock's time and hardly the processor's. On a GPU it is the time between two events on its
    stream. The GPU sleeps first, while the host queues the call: otherwise it would wait for the host within the call.
    What the host takes longer than ``QUEUEING`` for counts all the same.
    """
    if device.type != "cuda":
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        call()
        return clock() - start
    before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda._sleep(QUEUEING)  # type: ignore[no-untyped-call]
    before.record()
    call()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some times in seconds."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(times: list[float]) -> Spread:
        """Of one time or more."""
        if len(times) == 1:
            return Spread(times[0], times[0], times[0], 1)
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        return Spread(median, low, high, len(times))


@dataclass(frozen=True)
class Timing:
    """An op, reading the rows once, and torch by hand: with float32 sums, and with float64 sums if that differs."""

    op: Spread
    read: Spread
    plain: Spread
    exact: Spread | None = None


def measure(
    op: Callable[[], object],
    read: Callable[[], float],
    plain: Callable[[], object],
    exact: Callable[[], object] | None,
    device: torch.device,
    budget: float,
) -> Timing:
    """Repeats until each has run for about ``budget`` seconds.

    The op runs at least ``FEWEST`` times, what is written by hand ``FEWEST_BY_HAND``. The first call of each is not
    counted, unless it is so long that it stays the only one.
    """
    op()
    times: list[float] = []
    reads = []
    by_hand: dict[Callable[[], object], list[float]] = {call: [] for call in (plain, exact) if call is not None}
    for call, taken in by_hand.items():
        first = seconds(call, device)
        if first > LONG:
            taken.append(first)
    while len(times) < MOST and (len(times) < FEWEST or sum(times) < budget):
        times.append(seconds(op, device))
        reads.append(read())
        for call, taken in by_hand.items():
            if not taken or (taken[0] <= LONG and (len(taken) < FEWEST_BY_HAND or sum(taken) < budget)):
                taken.append(seconds(call, device))
    return Timing(Spread.of(times), Spread.of(reads), *map(Spread.of, by_hand.values()))
