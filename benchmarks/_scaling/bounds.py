# SPDX-License-Identifier: Apache-2.0
"""What no division of a round can beat: its largest clients, and the bytes that its processes must send."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def least_makespan(costs: Sequence[float], processes: int) -> float:
    """A lower bound of the time in which processes can train clients.

    The sum has to be done by all, the largest client by one. Of the ``q R + 1`` largest clients, one process has at
    least ``q + 1``, which are at least the smallest among these.

    Args:
        costs: of the clients, in any unit.
        processes: how many, ``R``.
    """
    ordered = sorted(costs, reverse=True)
    shared = [
        sum(ordered[count * processes - count : count * processes + 1])
        for count in range(1, (len(ordered) - 1) // processes + 1)
    ]
    return max([sum(ordered) / processes, *ordered[:1], *shared])


def longest_first(costs: Sequence[float], processes: int) -> list[float]:
    """When each process is done if the longest clients begin first, and whoever is free takes the next.

    Args:
        costs: of the clients, in any unit.
        processes: how many.

    Returns:
        One time per process, ascending.
    """
    ends = [0.0] * processes
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(ends, ends[0] + cost)
    return sorted(ends)


def column_bytes(clients: float, parameters: float, processes: int, width: float = 4) -> float:
    """Bytes that one process sends if every process owns a run of the columns.

    The other processes' columns of its clients' updates leave, and its columns of the new weights.

    Args:
        clients: per round, ``m``.
        parameters: ``n``.
        processes: ``R``.
        width: bytes of a number.
    """
    return (clients / processes + 1) * parameters * width * (processes - 1) / processes


def all_reduce_bytes(parameters: float, processes: int, width: float = 4) -> float:
    """Bytes that one process sends to add up one vector of all processes, in a ring.

    Args:
        parameters: ``n``.
        processes: ``R``.
        width: bytes of a number.
    """
    return 2 * parameters * width * (processes - 1) / processes
