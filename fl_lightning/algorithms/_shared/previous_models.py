# SPDX-License-Identifier: Apache-2.0
"""What MOON and FedCKA share: a client's last local model, and the global one that it received."""

from __future__ import annotations

import torch

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.records import ClientReport, LocalWork
from fl_lightning.core.model_snapshot import Snapshot, packed_buffers
from fl_lightning.core.storage.at_clients import at_clients
from fl_lightning.core.storage.declared import plain


class PreviousModels(ClientRule):
    """Remembers every client's model at the end of its local training, BatchNorm's statistics included.

    A client whose report did not arrive keeps the model of the round before. Models lie in files of ``directory``, or
    without one in memory on the CPU and in the checkpoint.
    """

    models = at_clients(files="directory")

    received: Snapshot  # the global model of this round
    previous: Snapshot | None = None  # the client's last local one, on the module's device

    def __init__(self, directory: str | None = None) -> None:
        self.directory = directory

    def begin_client(self, work: LocalWork) -> None:
        """Loads the received model and the client's last one."""
        device = work.params.device
        self.received = Snapshot(work.params, packed_buffers(work.module, device))
        model = self.models.get(work.client_id)
        self.previous = None if model is None else model.to(device)

    def end_client(self, work: LocalWork) -> ClientReport:
        """Keeps the client's model as it is now."""
        cpu = torch.device("cpu")
        return ClientReport(local_state={"models": plain(Snapshot(work.row.to(cpu), packed_buffers(work.module, cpu)))})
