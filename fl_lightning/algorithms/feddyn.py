# SPDX-License-Identifier: Apache-2.0
"""FedDyn: Federated Learning Based on Dynamic Regularization.

Durmus Alp Emre Acar, Yue Zhao, Ramon Matas Navarro, Matthew Mattina, Paul N. Whatmough, Venkatesh Saligrama.
ICLR 2021. https://arxiv.org/abs/2111.04263
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms._shared import client_vectors
from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.records import Federation, LocalWork
from fl_lightning.arguments import DEVICE, Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.storage.per_client import per_client
from fl_lightning.core.tensors import foreach_sub

_NAME = "FedDyn's h"


class FedDyn(FedAvg):
    """Clients' objectives change from round to round so that they agree with the server's on the optimum (Algorithm 1).

    Args:
        alpha: strength of the regularizer. The paper tries 0.1, 0.01 and 0.001.
        dual_device: where the clients' duals live, for instance ``"cpu"``; ``None``: on the federation's device. One
            vector of the model's size per client that has trained.

    Raises:
        ValueError: ``alpha`` is not positive.
    """

    @checked(alpha=Bounds(above=0), dual_device=DEVICE)
    def __init__(self, alpha: float = 0.01, dual_device: str | None = None) -> None:
        super().__init__("uniform")
        self.alpha, self.dual_device = alpha, dual_device
        self._client = DynamicRegularizer(alpha, dual_device)


class DynamicRegularizer(ClientRule):
    """Local objective ``L_i(w) - <h_i, w> + alpha/2 ||w - W||^2``, the duals ``h_i``, and the server's ``h``.

    The duals are kept divided by ``alpha``: ``h_i / alpha`` is the sum of the updates that client ``i`` has sent, and
    ``h / alpha`` that of all clients divided by their number. See :class:`FedDyn` for the arguments.
    """

    reads = "sums"

    h = server_state(Tensor)
    h_i = per_client(Tensor, sent="owner", device="dual_device")

    def __init__(self, alpha: float, dual_device: str | None = None) -> None:
        self.alpha, self.dual_device = alpha, dual_device
        self._anchor: list[Tensor] = []

    def refusal(self, server: ServerRule) -> str | None:
        """FedDyn corrects a mean of models, and nothing else."""
        why = f"the step of {type(server).__name__} is no mean: pair it with FedAvg or FedHEAL"
        return None if server.averages else f"adds h / alpha to a mean of the clients' models, and {why}"

    def clients_changed(self, federation: Federation, sizes: Tensor) -> None:
        """``h`` is the mean of the present clients' duals."""
        self.h = client_vectors.mean_of(self.h_i, federation, torch.full((len(sizes),), 1 / len(sizes)))

    def begin_fit(self, federation: Federation) -> None:
        """Starts ``h`` at 0."""
        self.h = client_vectors.at_begin(self.h, federation, _NAME)

    def begin_client(self, work: LocalWork) -> None:
        """Prepares ``W + h_i / alpha``, the point that the quadratic and the linear term pull to together."""
        dual = self.h_i.get(work.client_id)
        self._anchor = work.layout.views(work.params if dual is None else work.params + dual.to(work.params))

    def correct_gradients(self, work: LocalWork) -> None:
        """Adds ``-h_i + alpha (w - W)`` to the gradient (equation 1); parameters without one stay as they are."""
        away = foreach_sub([parameter.detach() for parameter in work.parameters], self._anchor)
        client_vectors.add_to_gradients(work, away, self.alpha)

    def adjust_step(self, cohort: Cohort, step: Tensor) -> Tensor:
        """Turns ``W - mean_i w_i`` into ``W - (mean_i w_i - h / alpha)`` with this round's ``h``."""
        return step + self._h_after(cohort).to(step)

    def commit(self, cohort: Cohort) -> None:
        """``h_i -= alpha (w_i - W)`` and ``h -= alpha / N sum_i (w_i - W)``."""
        h = self._h_after(cohort)
        client_vectors.check_vector(h, cohort, cohort.updates, _NAME)
        self.h = h
        client_vectors.add_to_own(self.h_i, cohort, cohort.updates)

    def _h_after(self, cohort: Cohort) -> Tensor:
        return client_vectors.add_sent(self.h, cohort, cohort.updates, client_vectors.uniform_shares(cohort))
