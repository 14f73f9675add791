# SPDX-License-Identifier: Apache-2.0
"""MOON: Model-Contrastive Federated Learning.

Qinbin Li, Bingsheng He, Dawn Song. CVPR 2021. https://arxiv.org/abs/2103.16257
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.features import features_of, own_features
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.records import ClientReport, LocalWork, Needs
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.model_snapshot import Snapshot, packed_buffers
from fl_lightning.core.storage.at_clients import at_clients
from fl_lightning.core.storage.declared import plain


class MOON(FedAvg):
    """A client's features are drawn to the global model's and away from those of its last local model (Algorithm 1).

    The module defines ``federated_features(batch)``, see :mod:`fl_lightning.algorithms.features`.

    Args:
        mu: weight of the contrastive term; 0 is FedAvg. The paper tries 0.1, 1, 5 and 10.
        temperature: of the contrastive term, 0.5 in the paper.
        weighting: how the server weighs clients, see :class:`FedAvg`.
        directory: where the clients' last models lie, a directory for this fit alone; ``None``: in memory and in the
            checkpoint.

    Raises:
        ValueError: ``mu`` is negative, or ``temperature`` is not positive.
    """

    @checked(mu=Bounds(0), temperature=Bounds(above=0))
    def __init__(
        self,
        mu: float = 1.0,
        temperature: float = 0.5,
        weighting: Literal["samples", "uniform"] = "samples",
        directory: str | None = None,
    ) -> None:
        super().__init__(weighting)
        self.mu, self.temperature, self.directory = mu, temperature, directory
        self._client = ModelContrast(mu, temperature, directory)


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


class ModelContrast(PreviousModels):
    """Adds ``-mu log(e^(sim(z, z_glob)/T) / (e^(sim(z, z_glob)/T) + e^(sim(z, z_prev)/T)))`` (equations 3 and 4)."""

    needs = Needs(features=True)

    def __init__(self, mu: float, temperature: float, directory: str | None = None) -> None:
        super().__init__(directory)
        self.mu, self.temperature = mu, temperature

    def loss_term(self, work: LocalWork, batch: Any, batch_idx: int) -> Tensor | None:
        """The mean of the term over the batch; ``None`` in a client's first round, in which there is no last model."""
        if self.mu == 0 or self.previous is None:
            return None
        z = own_features(work, batch).values
        near = cosine_similarity(z, features_of(self.received, work, batch), dim=1)
        far = cosine_similarity(z, features_of(self.previous, work, batch), dim=1)
        return self.mu * softplus((far - near) / self.temperature).mean()
