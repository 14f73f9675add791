# SPDX-License-Identifier: Apache-2.0
"""FedDyn: Federated Learning Based on Dynamic Regularization.

Durmus Alp Emre Acar, Yue Zhao, Ramon Matas Navarro, Matthew Mattina, Paul N. Whatmough, Venkatesh Saligrama.
ICLR 2021. https://arxiv.org/abs/2111.04263
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule, Federation, LocalWork, ServerRule, State
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.tensors import ClientTensors


class FedDyn(FedAvg):
    """Clients' objectives change from round to round so that they agree with the server's on the optimum (Algorithm 1).

    Args:
        alpha: strength of the regularizer. The paper tries 0.1, 0.01 and 0.001.
        dual_device: where the clients' duals live, for instance ``"cpu"``; ``None``: on the federation's device. One
            vector of the model's size per client that has trained.

    Raises:
        ValueError: ``alpha`` is not positive.
    """

    def __init__(self, alpha: float = 0.01, dual_device: str | None = None) -> None:
        super().__init__("uniform")
        if not alpha > 0:
            raise ValueError(f"alpha of FedDyn must be positive, found {alpha}")
        self.alpha = alpha
        self._client = DynamicRegularizer(alpha, dual_device)

    def client_rule(self) -> ClientRule:
        """The duals of clients and server; the same object on every call."""
        return self._client


class DynamicRegularizer(ClientRule):
    """Local objective ``L_i(w) - <h_i, w> + alpha/2 ||w - W||^2``, the duals ``h_i``, and the server's ``h``.

    The duals are kept divided by ``alpha``: ``h_i / alpha`` is the sum of the updates that client ``i`` has sent, and
    ``h / alpha`` that of all clients divided by their number. A client that has not trained yet has 0, and one whose
    report did not arrive keeps what it had, so the server's ``h`` is the mean of the duals at all times.

    Args:
        alpha: see :class:`FedDyn`.
        device: where the clients' duals live; ``None``: on the federation's device.
    """

    def __init__(self, alpha: float, device: str | None = None) -> None:
        self.alpha = alpha
        self._clients = ClientTensors(device)  # h_i / alpha
        self._server: Tensor | None = None  # h / alpha
        self._anchor: list[Tensor] = []

    def refusal(self, server: ServerRule) -> str | None:
        """FedDyn corrects a mean of models, and nothing else."""
        if server.averages:
            return None
        return (
            f"adds h / alpha to a mean of the clients' models, and the step of {type(server).__name__} is no mean: "
            "pair it with FedAvg or FedHEAL"
        )

    def begin_fit(self, federation: Federation) -> None:
        """Starts with ``h = 0``, or moves a restored one to the federation's device.

        Raises:
            ValueError: a restored ``h`` has another length than the model.
        """
        if self._server is None:
            return
        if self._server.shape != (federation.layout.numel,):
            found = f"found {self._server.numel()} in the checkpoint"
            raise ValueError(f"FedDyn's h must have {federation.layout.numel} numbers, {found}")
        self._server = self._server.to(federation.device)

    def begin_client(self, work: LocalWork) -> None:
        """Prepares ``W + h_i / alpha``, the point that the quadratic and the linear term pull to together."""
        dual = self._clients.get(work.client_id)
        self._anchor = work.layout.views(work.params if dual is None else work.params + dual.to(work.params))

    def correct_gradients(self, work: LocalWork) -> None:
        """Adds ``-h_i + alpha (w - W)`` to the gradient (equation 1); parameters without one stay as they are."""
        trained = [
            (p.grad, p.detach(), a) for p, a in zip(work.parameters, self._anchor, strict=True) if p.grad is not None
        ]
        if trained:
            gradients, parameters, anchors = (list(column) for column in zip(*trained, strict=True))
            torch._foreach_add_(gradients, torch._foreach_sub(parameters, anchors), alpha=self.alpha)

    def take_aside(self, client_id: int) -> State:
        """Nothing: the updates say it all."""
        return {}

    def adjust_step(self, cohort: Cohort, step: Tensor) -> Tensor:
        """Turns ``W - mean_i w_i`` into ``W - (mean_i w_i - h / alpha)`` with this round's ``h``."""
        return step + self._advanced(cohort).to(step)

    def commit(self, cohort: Cohort) -> None:
        """Updates ``h_i -= alpha (w_i - W)`` and ``h -= alpha / N sum_i (w_i - W)``."""
        self._server = self._advanced(cohort)
        for client, row in zip(cohort.client_ids, cohort.updates.rows, strict=True):
            self._clients.add(client, row)

    def _advanced(self, cohort: Cohort) -> Tensor:
        """The server's ``h / alpha`` with the round's updates in it, whatever weights the server's step gives them."""
        held = torch.zeros_like(cohort.params) if self._server is None else self._server.clone()
        shares = torch.full_like(cohort.sizes, 1.0 / (cohort.num_clients or len(cohort)))
        return cohort.updates.combine(shares, out=held)

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the duals."""
        return {"duals": (federation.num_clients + 1) * federation.layout.numel * federation.dtype.itemsize}

    def reset(self) -> None:
        """Forgets all duals."""
        self._clients.clear()
        self._server = None

    def state_dict(self) -> State:
        """Duals of server and clients, divided by ``alpha``."""
        state: State = {"clients": self._clients.state_dict()}
        if self._server is not None:
            state["server"] = self._server
        return state

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._clients.load_state_dict(state["clients"])
        self._server = state["server"].clone() if "server" in state else None
