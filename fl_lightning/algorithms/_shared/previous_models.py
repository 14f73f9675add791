# SPDX-License-Identifier: Apache-2.0
"""What MOON and FedCKA share: a client's last local model, and the global one that it received."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.records import ClientReport, Federation, LocalWork, State
from fl_lightning.core.layout import ParamLayout
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
    column_state = ()
    placement = ("device",)

    received: Snapshot
    previous: Snapshot | None = None

    def __init__(self, device: str | None = None, max_models: int | None = None) -> None:
        self._models = ClientModels(device, max_models)
        self._device, self.max_models = device, max_models
        self._buffer_bytes = 0

    def check_module(self, module: nn.Module, layout: ParamLayout) -> None:
        """Notes how large the module's buffers are, for the memory plan."""
        self._buffer_bytes = packed_buffers(module, torch.device("cpu")).numel()

    def begin_client(self, work: LocalWork) -> None:
        """Loads the received model and the client's last one."""
        device = work.params.device
        self.received = Snapshot(work.params, packed_buffers(work.module, device))
        model = self._models.get(work.client_id)
        self.previous = None if model is None else model.to(device)

    def end_client(self, work: LocalWork) -> ClientReport:
        """Keeps the client's model as it is now."""
        device = torch.device(self._device or work.params.device)
        return ClientReport(kept={"params": work.row.to(device), "buffers": packed_buffers(work.module, device)})

    def keep(self, client_id: int, kept: State, when: int) -> None:
        """Replaces the client's last model."""
        self._models.set(client_id, Snapshot(**kept), when)

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the remembered models, and of those of a round."""
        size = federation.layout.numel * federation.dtype.itemsize + self._buffer_bytes
        kept = min(federation.num_clients, self.max_models or federation.num_clients)
        return {"last_local_models": (kept + cohort_size) * size}

    def reset(self) -> None:
        """Forgets all models."""
        self._models.clear()

    def state_dict(self) -> State:
        """The remembered models."""
        return self._models.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._models.load_state_dict(state)
