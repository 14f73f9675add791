# SPDX-License-Identifier: Apache-2.0
"""What MOON and FedCKA share: a client's last local model, and the global one that it received."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import ClientReport, ClientRule, Federation, LocalWork, State
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.model_snapshot import Snapshot, packed_buffers
from fl_lightning.core.storage.models import ClientModels


class PreviousModels(ClientRule):
    """Remembers every client's model at the end of its local training, BatchNorm's statistics included.

    A client whose report did not arrive keeps the model of the round before.

    Args:
        device: where the models live; ``None``: on the federation's device.
        max_models: most clients to remember; ``None``: all.

    Attributes:
        received: the global model of this round.
        previous: the client's last local model, on the device of the module; ``None`` if there is none.
    """

    reads = "sums"
    placement = ("device",)

    received: Snapshot
    previous: Snapshot | None = None

    def __init__(self, device: str | None = None, max_models: int | None = None) -> None:
        self._models = ClientModels(device, max_models)
        self.max_models = max_models
        self._buffers: dict[int, Tensor] = {}  # of this round's clients
        self._buffer_bytes = 0

    def check_module(self, module: nn.Module) -> None:
        """Notes how large the module's buffers are, for the memory plan."""
        self._buffer_bytes = packed_buffers(module, torch.device("cpu")).numel()

    def begin_client(self, work: LocalWork) -> None:
        """Loads the received model and the client's last one."""
        device = work.params.device
        self.received = Snapshot(work.params, packed_buffers(work.module, device))
        model = self._models.get(work.client_id)
        self.previous = None if model is None else model.to(device)

    def end_client(self, work: LocalWork) -> ClientReport:
        """Sets the client's buffers aside until its round counts; its parameters are in its row."""
        self._buffers[work.client_id] = packed_buffers(work.module, work.row.device)
        return ClientReport()

    def take_aside(self, client_id: int) -> State:
        """The client's buffers."""
        return {"buffers": self._buffers[client_id]}

    def put_aside(self, client_id: int, state: State) -> None:
        """Takes what :meth:`take_aside` returned in another process."""
        self._buffers[client_id] = state["buffers"]

    def commit(self, cohort: Cohort) -> None:
        """Replaces the last models of the clients whose reports arrived."""
        nothing = torch.empty(0, dtype=torch.uint8)
        for client, row in zip(cohort.client_ids, cohort.updates.rows, strict=True):
            self._models.set(client, Snapshot(cohort.params - row, self._buffers.get(client, nothing)))
        self._buffers = {}

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the remembered models."""
        size = federation.layout.numel * federation.dtype.itemsize + self._buffer_bytes
        return {"last_local_models": min(federation.num_clients, self.max_models or federation.num_clients) * size}

    def reset(self) -> None:
        """Forgets all models."""
        self._models.clear()
        self._buffers = {}

    def state_dict(self) -> State:
        """The remembered models."""
        return self._models.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._models.load_state_dict(state)
        self._buffers = {}
