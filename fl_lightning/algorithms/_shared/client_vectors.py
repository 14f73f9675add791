# SPDX-License-Identifier: Apache-2.0
"""What SCAFFOLD and FedDyn share: a vector of the model's size per client, and one on the server."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.rows import require_finite
from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.records import Federation, State
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.tensors import ClientTensors
from fl_lightning.core.updates import UpdateMatrix


class ClientVectors(ClientRule, ABC):
    """Sums up what clients send, for each client and, weighted by :meth:`shares`, on the server.

    All vectors start at 0. A client whose report did not arrive keeps what it had, so the server's vector is the
    weighted mean of the clients' at all times.

    Args:
        device: where the clients' vectors live; ``None``: on the federation's device.
    """

    reads = "sums"
    column_state = ("server", "client", "clients.tensors")
    placement = ("device",)

    vectors: str
    """What errors call the vectors."""

    def __init__(self, device: str | None = None) -> None:
        self._clients = ClientTensors(device)
        self._server: Tensor | None = None

    def begin_fit(self, federation: Federation) -> None:
        """Starts the server's vector at 0, or moves a restored one to the federation's device.

        Raises:
            ValueError: a restored vector has another length than the model.
        """
        n = federation.numel
        if self._server is None:
            self._server = torch.zeros(n, dtype=federation.dtype, device=federation.device)
        if self._server.shape != (n,):
            found = f"{self._server.numel()} in the checkpoint"
            raise ValueError(f"{self.vectors} must have {n} numbers, found {found}")
        self._server = self._server.to(federation.device)

    @abstractmethod
    def sent(self, cohort: Cohort) -> UpdateMatrix:
        """What the round's clients sent, ``[m, n]``."""

    def of_server(self, like: Tensor) -> Tensor:
        """The server's vector ``[n]``, not a copy."""
        if self._server is None:
            self._server = torch.zeros_like(like)
        return self._server

    def with_round(self, cohort: Cohort) -> Tensor:
        """The server's vector ``[n]`` after the round, whatever weights the server's step gives the clients."""
        return self.sent(cohort).combine(self.shares(cohort), out=self.of_server(cohort.params).clone())

    def shares(self, cohort: Cohort) -> Tensor:
        """``[m]`` what each client of the round counts in the server's vector, of 1 for all registered clients."""
        return torch.full_like(cohort.sizes, 1.0 / (cohort.num_clients or len(cohort)))

    def broadcast(self) -> State:
        """The server's vector."""
        return {} if self._server is None else {"server": self._server}

    def take_broadcast(self, state: State) -> None:
        """Takes the server's vector."""
        self._server = state.get("server")

    def state_for(self, client_id: int) -> State:
        """The client's vector, if it has one."""
        mine = self._clients.get(client_id)
        return {} if mine is None else {"client": mine}

    def take_state(self, client_id: int, state: State) -> None:
        """Takes the client's vector."""
        if "client" in state:
            self._clients.set(client_id, state["client"])

    def commit(self, cohort: Cohort) -> None:
        """Adds what the round's clients sent.

        Raises:
            ValueError: a row is not finite.
        """
        server = self.with_round(cohort)
        if not bool(cohort.updates.norm_of(server).isfinite()):
            require_finite(self.sent(cohort).norms().isfinite(), cohort, self.vectors)
        self._server = server
        for client, row in zip(cohort.client_ids, self.sent(cohort).rows, strict=True):
            self._clients.add(client, row)

    def reset(self) -> None:
        """Forgets all vectors."""
        self._clients.clear()
        self._server = None

    def state_dict(self) -> State:
        """The vectors of server and clients."""
        state: State = {"clients": self._clients.state_dict()}
        return state if self._server is None else state | {"server": self._server}

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._clients.load_state_dict(state["clients"])
        self._server = state["server"].clone() if "server" in state else None
