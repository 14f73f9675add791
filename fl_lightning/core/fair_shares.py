# SPDX-License-Identifier: Apache-2.0
"""Work divided beforehand among several who should end at about the same time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def fair_shares(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Clients per rank, ascending, whose costs differ little: the dearest first, each to whoever has least."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for client in sorted((c for c, cost in enumerate(costs) if cost), key=lambda client: (-costs[client], client)):
        load, rank = heapq.heappop(loads)
        found[rank].append(client)
        heapq.heappush(loads, (load + costs[client], rank))
    return [sorted(clients) for clients in found]
