# SPDX-License-Identifier: Apache-2.0
"""How long FedLF's small problems take on this machine."""

from __future__ import annotations

import time

import torch

from fl_lightning.algorithms import FedLF
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.updates import UpdateMatrix


def solve_time(clients: int, layers: int = 10, columns: int = 4096) -> float:
    """Seconds of processor time per layer, without the products of rows and without combining them.

    Args:
        clients: per round.
        layers: of equal size.
        columns: of a layer; more than clients, so that rows are independent.
    """
    generator = torch.Generator().manual_seed(0)
    layout = ParamLayout.from_sizes([columns] * layers)
    rows = torch.randn(clients, layout.numel, generator=generator) + torch.randn(layout.numel, generator=generator)
    losses = torch.rand(clients, generator=generator) + 0.5
    rule, best = FedLF(layers="tensor", history_window="none"), float("inf")
    for _ in range(3):
        updates = UpdateMatrix(rows, layout)
        sizes, ids = torch.full((clients,), 600.0), tuple(range(clients))
        cohort = Cohort(torch.zeros(layout.numel), updates, losses, sizes, ids, 0, 0.1)
        updates.gram()  # kept by the matrix
        began = time.process_time()
        rule.aggregate(cohort)
        solved = time.process_time()
        updates.combine(torch.ones(layers, clients, dtype=torch.float64))
        best = min(best, (solved - began) - (time.process_time() - solved))
    return best / layers
