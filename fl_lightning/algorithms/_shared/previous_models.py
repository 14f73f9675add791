# SPDX-License-Identifier: Apache-2.0
"""What MOON and FedCKA share: a client's last local model, and the global one that it received."""

from __future__ import annotations

import torch

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.records import ClientReport, LocalWork
from fl_lightning.core.model_snapshot import Snapshot, packed_buffers
from fl_lightning.core.storage.declared import at_clients
from fl_lightning.core.storage.per_client import plain


class PreviousModels(ClientRule):
    """Remembers every client's model at the end of its local training, BatchNorm's statistics included.

    A client whose report did not arrive keeps the model of the round before. Models live on ``model_device``, by
    default the federation's, and at most ``max_models`` of them.
    """

    models = at_clients(device="model_device", capacity="max_models")

    received: Snapshot  # the global model of this round
    previous: Snapshot | None = None  # the client's last local one, on the module's device

    def __init__(self, model_device: str | None = None, max_models: int | None = None) -> None:
        self.model_device, self.max_models = model_device, max_models

    def begin_client(self, work: LocalWork) -> None:
        """Loads the received model and the client's last one."""
        device = work.params.device
        self.received = Snapshot(work.params, packed_buffers(work.module, device))
        model = self.models.get(work.client_id)
        self.previous = None if model is None else model.to(device)

    def end_client(self, work: LocalWork) -> ClientReport:
        """Keeps the client's model as it is now."""
        device = torch.device(self.model_device or work.params.device)
        return ClientReport(
            local_state={"models": plain(Snapshot(work.row.to(device), packed_buffers(work.module, device)))}
        )
