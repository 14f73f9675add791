# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing: an op, its reference and a plain read take turns, so that they share whatever else goes on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

FEWEST, MOST = 5, 201
FEWEST_LOOPS = 3
QUEUEING = 2_000_000  # clock cycles of a GPU, about 1 ms: longer than the host takes to queue an op


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call; on a GPU the time between two events on its stream.

    The GPU sleeps first, while the host queues the call: otherwise it would wait for the host within the call. What the
    host takes longer than ``QUEUEING`` for counts all the same.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
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
    """An op, its reference, reading the rows once, and the loop written by hand where there is one."""

    op: Spread
    reference: Spread
    read: Spread
    loop: Spread | None = None


def measure(
    op: Callable[[], object],
    reference: Callable[[], object],
    read: Callable[[], float],
    device: torch.device,
    budget: float,
    loop: Callable[[], object] | None = None,
) -> Timing:
    """Repeats until op, reference and loop have each run for about ``budget`` seconds.

    The op runs at least ``FEWEST`` times, the loop ``FEWEST_LOOPS``.

    The first call of each is not counted; only of a reference that takes longer than the budget, where it is the one
    that counts.
    """
    op()
    times: list[float] = []
    reference_times = [seconds(reference, device)]
    if reference_times[0] < budget:
        reference_times.clear()
    reads = []
    loops: list[float] = []
    if loop is not None:
        loop()
    while len(times) < MOST and (len(times) < FEWEST or sum(times) < budget):
        times.append(seconds(op, device))
        reads.append(read())
        if not reference_times or sum(reference_times) < budget:
            reference_times.append(seconds(reference, device))
        if loop is not None and (len(loops) < FEWEST_LOOPS or sum(loops) < budget):
            loops.append(seconds(loop, device))
    return Timing(Spread.of(times), Spread.of(reference_times), Spread.of(reads), Spread.of(loops) if loops else None)
