# SPDX-License-Identifier: Apache-2.0
"""Bulyan: The Hidden Vulnerability of Distributed Learning in Byzantium.

El Mahdi El Mhamdi, Rachid Guerraoui, Sébastien Rouault. ICML 2018. https://arxiv.org/abs/1802.07927
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms.guards.base import Guard, Rows, Verdict, assumed, below_half, require_clients
from fl_lightning.algorithms.guards.coordinates import by_columns
from fl_lightning.algorithms.guards.krum import scores
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort


def selected(distances: Tensor, dishonest: int, count: int) -> list[int]:
    """Section 4, step 1: places of Krum's choice among the rows that are left, ``count`` (theta) times, in this order.

    From squared distances ``[n, n]``. Krum looks at the ``k - f - 2`` nearest of ``k`` rows that are left, at least at
    one.
    """
    left, chosen = list(range(len(distances))), list[int]()
    for _ in range(count):
        among = scores(distances[left][:, left], dishonest) if len(left) > 1 else torch.zeros(1)
        chosen.append(left.pop(int(among.argmin())))
    return chosen


class Bulyan(Guard):
    """Krum's choice, repeated, and then in each coordinate the mean of the chosen values nearest to their median.

    ``m - 2 f`` clients are chosen; the others take no part in the round. Of their values in a coordinate,
    ``m - 4 f`` count. With ``rows="same"`` every row becomes the mean of these. With ``rows="own"``, each chosen row
    keeps its values but for those that would not count: they move to the nearest one that does. A round with fewer than
    ``4 f + 3`` usable reports changes nothing.

    Args:
        dishonest: ``f``, as a count or as a share of the cohort, rounded up.
        rows: what becomes of the rows.

    Raises:
        ValueError: ``dishonest`` is out of range.
    """

    @checked(dishonest=Bounds(0))
    def __init__(self, dishonest: float | int, rows: Rows = "same") -> None:
        self.dishonest, self.rows = below_half(dishonest, self), rows

    def needed(self, m: int) -> int:
        """``4 f + 3``."""
        return 4 * assumed(self.dishonest, m) + 3

    def max_remaining(self, m: int) -> int:
        """``m - 2 f``."""
        return m - 2 * assumed(self.dishonest, m)

    def judge(self, cohort: Cohort) -> Verdict:
        """See the class."""
        m = len(cohort)
        f = assumed(self.dishonest, m)
        require_clients(m, self)
        # Where one neighbour counts, the two nearest rows have equal scores: then the lower id is taken.
        order = sorted(range(m), key=cohort.client_ids.__getitem__)
        distances = cohort.updates.squared_distances()[order][:, order]
        chosen = sorted(order[place] for place in selected(distances, f, m - 2 * f))  # theta = m - 2 f
        reason = "Bulyan finds its update too far from the others"
        left_out = {place: reason for place in range(m) if place not in chosen}

        def nearest(columns: Tensor) -> tuple[Tensor, ...]:
            ordered = columns.sort(-1).values
            middle = (ordered[:, (len(chosen) - 1) // 2] + ordered[:, len(chosen) // 2])[:, None] / 2
            order = (ordered - middle).abs().sort(dim=-1, stable=True).indices[:, : m - 4 * f]  # beta = theta - 2 f
            counting = ordered.gather(1, order)
            return counting.double().mean(-1), counting.amin(-1), counting.amax(-1)

        mean, low, high = by_columns(cohort.updates.rows[chosen], nearest)
        if self.rows == "own":
            return Verdict(left_out, bounds=(low, high))
        return Verdict(left_out, scale=torch.zeros(m, dtype=torch.float64), center=mean)
