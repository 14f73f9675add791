# SPDX-License-Identifier: Apache-2.0
"""FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping.

Xiaoyu Cao, Minghong Fang, Jia Liu, Neil Zhenqiang Gong. NDSS 2021. https://arxiv.org/abs/2012.13995
"""

from __future__ import annotations

import torch

from fl_lightning.algorithms.guards.base import CannotGuardError, Guard, Rows, Verdict
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort


class CosineTrust(Guard):
    """Weighs updates by their cosine with one that the server trusts, and gives all of them its length (Algorithm 2).

    The server's own data are those of one registered client, which trains in every round like the others:
    ``UniformSampler(always=(0,))``. With its update ``g_0``, the trust in client ``i`` is
    ``TS_i = max(cos(g_i, g_0), 0)``, and the paper's mean is ``sum_i TS_i (||g_0|| / ||g_i||) g_i / sum_i TS_i``.

    With ``rows="same"`` every row becomes that mean. With ``rows="own"``, row ``i`` is multiplied by its factor in this
    mean and the number of clients that are left: their plain mean is then the paper's. Clients without trust are left
    out, and so is the server's own update, which only judges the others. A round changes nothing if the trusted client
    has not reported, if its update is zero, or if nobody has trust.

    Args:
        client: the id of the client with the server's data.
        rows: what becomes of the rows.

    Raises:
        ValueError: ``client`` is negative.
    """

    reads = "gram"

    @checked(client=Bounds(0))
    def __init__(self, client: int, rows: Rows = "same") -> None:
        self.client, self.rows = client, rows

    def needed(self, m: int) -> int:
        """The trusted client, and one that it judges."""
        return 2

    def max_remaining(self, m: int) -> int:
        """All but the trusted client."""
        return m - 1

    def check(self, num_clients: int) -> None:
        """Refuses a trusted client that is not registered."""
        if self.client >= num_clients:
            raise ValueError(f"client of CosineTrust must be an id below {num_clients}, found {self.client}")

    def judge(self, cohort: Cohort) -> Verdict:
        """See the class."""
        updates, m = cohort.updates, len(cohort)
        if self.client not in cohort.client_ids:
            raise CannotGuardError(f"no report of client {self.client}, with which CosineTrust compares the others")
        own = cohort.client_ids.index(self.client)
        norms = updates.norms().cpu()
        if not norms[own] > 0:
            raise CannotGuardError(f"an update of zeros from client {self.client}, which CosineTrust trusts")
        products = updates.cross_gram(updates.rows[own : own + 1]).sum(0)[:, 0].cpu()
        trust = torch.where(norms > 0, products / (norms * norms[own]), 0.0).clamp(0, 1)  # TS_i
        trust[own] = 0
        if not bool(trust.any()):
            raise CannotGuardError(f"no update that agrees with that of client {self.client}, which CosineTrust trusts")
        factors = torch.where(trust > 0, trust / trust.sum() * norms[own] / norms, 0.0)
        left_out = {place: "CosineTrust finds its update at odds with the server's" for place in range(m)
                    if not trust[place] > 0}  # fmt: skip
        left_out[own] = "CosineTrust compares the others with it"
        scalars = {"mean_trust": float(trust.sum()) / max(m - 1, 1)}
        if self.rows == "own":
            return Verdict(left_out, scale=factors * (m - len(left_out)), scalars=scalars)
        center = updates.combine(factors)
        return Verdict(left_out, scale=torch.zeros(m, dtype=torch.float64), center=center, scalars=scalars)
