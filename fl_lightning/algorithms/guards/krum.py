# SPDX-License-Identifier: Apache-2.0
"""Krum: Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent.

Peva Blanchard, El Mahdi El Mhamdi, Rachid Guerraoui, Julien Stainer. NeurIPS 2017.
https://papers.nips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms.guards.base import Guard, Verdict, assumed, below_half, require_clients
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort


def scores(distances: Tensor, dishonest: int) -> Tensor:
    """``s(i)``, section 4: the sum ``[n]`` of a row's squared distances to its ``n - f - 2`` nearest others."""
    n = len(distances)
    to_others = distances.clone().fill_diagonal_(torch.inf)  # nobody is their own neighbour
    return to_others.sort(1).values[:, : max(n - dishonest - 2, 1)].sum(1)


class MultiKrum(Guard):
    """Keeps the clients whose updates lie nearest to others; the rest take no part in the round.

    A client's score is the sum of squared distances from its update to the ``m - f - 2`` nearest others. The ``keep``
    clients with the smallest scores stay (of equal ones the lower ids). With a mean behind it, this is the paper's
    Multi-Krum; with ``keep = 1`` it is :class:`Krum`. A round with fewer than ``2 f + 3`` usable reports changes
    nothing.

    Clients with unusual data are left out, too: the very ones that fair methods work for.

    Args:
        dishonest: ``f``, as a count or as a share of the cohort, rounded up.
        keep: how many clients stay; ``None``: ``m - f``.

    Raises:
        ValueError: an argument is out of range.
    """

    reads = "gram"

    @checked(dishonest=Bounds(0), keep=Bounds(1))
    def __init__(self, dishonest: float | int, keep: int | None = None) -> None:
        self.dishonest, self.keep = below_half(dishonest, self), keep

    def needed(self, m: int) -> int:
        """``2 f + 3``, and no fewer than are to stay."""
        return max(2 * assumed(self.dishonest, m) + 3, self.keep or 0)

    def max_remaining(self, m: int) -> int:
        """``keep``, or ``m - f``."""
        return m - assumed(self.dishonest, m) if self.keep is None else self.keep

    def judge(self, cohort: Cohort) -> Verdict:
        """See the class."""
        m = len(cohort)
        f = assumed(self.dishonest, m)
        require_clients(m, self)
        keep = self.max_remaining(m)
        by_id = torch.tensor(cohort.client_ids).argsort()
        order = by_id[scores(cohort.updates.squared_distances(), f)[by_id].sort(stable=True).indices]
        reason = f"{type(self).__name__} finds its update too far from the others"
        return Verdict(dict.fromkeys(sorted(order[keep:].tolist()), reason))


class Krum(MultiKrum):
    """Keeps the one client whose update lies nearest to others: :class:`MultiKrum` with ``keep=1``.

    Args:
        dishonest: ``f``, as a count or as a share of the cohort, rounded up.

    Raises:
        ValueError: ``dishonest`` is out of range.
    """

    @checked(dishonest=Bounds(0))
    def __init__(self, dishonest: float | int) -> None:
        super().__init__(dishonest, keep=1)
