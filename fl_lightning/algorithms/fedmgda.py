# SPDX-License-Identifier: Apache-2.0
"""FedMGDA+: Federated Learning Meets Multi-Objective Optimization.

Zeou Hu, Kiarash Shaloudegi, Guojun Zhang, Yaoliang Yu. IEEE Transactions on Network Science and Engineering 9 (2022).
https://arxiv.org/abs/2006.11489
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.rows import ZERO_DIRECTION, JointRows, length, live_rows, no_step
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Needs, StepReport
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.ops.rows import row_norms
from fl_lightning.ops.solvers import box_min_norm


class FedMGDAPlus(ServerRule):
    """The shortest combination of the unit updates whose weights stay near the shares of the data.

    With ``v_i = u_i / ||u_i||`` and ``p_i = n_i / n`` the direction is ``d = sum_i lam_i v_i``, where ``lam`` minimises
    ``||d||^2`` subject to ``sum_i lam_i = 1`` and ``|lam_i - p_i| <= epsilon``. The step is ``eta_s d``: its length is
    at most ``eta_s`` and shrinks towards a Pareto-stationary point. ``epsilon = 0`` is FedAvg on unit updates,
    ``epsilon = 1`` is MGDA, whose direction no client conflicts with.

    Degenerate cases. A client whose update is 1e-8 times shorter than the median is left out for the round, and the
    shares of the others are taken among themselves. A direction shorter than 1e-4 counts as zero: the step is zero and
    flagged, as it is where all updates are zero.

    Args:
        epsilon: how far a weight may be from the client's share of the data, in [0, 1].
        server_lr: the step size ``eta_s``; ``None`` takes the clients' learning rate of the round.

    Raises:
        ValueError: an argument is out of range.
    """

    reads = "gram"

    @checked(epsilon=Bounds(0, 1), server_lr=Bounds(above=0))
    def __init__(self, epsilon: float = 0.1, server_lr: float | None = None) -> None:
        self.needs = Needs(client_lr=server_lr is None)
        self.epsilon = epsilon
        self.server_lr = server_lr

    def aggregate(self, cohort: Cohort) -> Tensor:
        """See the class."""
        eta = cohort.client_lr if self.server_lr is None else self.server_lr
        if eta is None:
            raise ValueError("client_lr must be given: it is the step size of FedMGDAPlus unless server_lr is set")
        rows = JointRows(cohort, "FedMGDAPlus")
        gram = rows.on_cpu(rows.gram.sum(0))  # K [m, m]
        norms = row_norms(gram)
        live = live_rows(norms, len(cohort))
        if not bool(live.any()):
            return no_step(self, cohort, direction_norm=0.0)
        inverse = torch.where(live, 1 / norms, 0.0)
        cosines = inverse[:, None] * gram * inverse  # v_i . v_j
        shares = torch.where(live, cohort.sizes, 0.0)
        shares /= shares.sum().clamp_min(1)  # p_i
        upper = torch.where(live, (shares + self.epsilon).clamp_max(1), 0.0)
        lam = box_min_norm(cosines, (shares - self.epsilon).clamp_min(0), upper)
        size = float(length(lam, cosines))  # ||d||
        if not size > ZERO_DIRECTION:
            return no_step(self, cohort, direction_norm=size)
        weights = eta * lam * inverse
        self.report = StepReport(weights=weights, scalars={"direction_norm": size})
        return rows.combine(weights)
