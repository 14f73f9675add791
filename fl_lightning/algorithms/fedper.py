# SPDX-License-Identifier: Apache-2.0
"""FedPer: Federated Learning with Personalization Layers.

Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya Kumar Singh, Sunav Choudhary. 2019. https://arxiv.org/abs/1912.00818
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fl_lightning.algorithms._shared.personal_layers import PersonalLayers
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.arguments import FILLED, Bounds, check_unused, checked


class FedPer(FedAvg):
    """FedAvg on base layers; the personalization layers, the last ones, stay at their client (Algorithms 1 and 2).

    Both kinds are trained together. Validation and test evaluate every client with its own layers as well; what the
    module logs then stands under ``personal/<metric>``. The values without ``personal/`` are those of the trained base
    under the head that training began with, and say little.

    Args:
        personal: names of the submodules that stay at clients, with all that is below them; ``None``: the last
            ``num_layers`` that own trained parameters.
        num_layers: how many, where ``personal`` does not name them; the paper's K_P.
        weighting: how the server weighs clients; by samples in the paper.
        directory: where the clients' layers live in files; ``None``: in memory on the CPU and in the checkpoint.

    Raises:
        ValueError: ``personal`` is empty, or ``num_layers`` is not positive.
    """

    @checked(personal=FILLED, num_layers=Bounds(1))
    def __init__(
        self,
        personal: Sequence[str] | None = None,
        num_layers: int = 1,
        weighting: Literal["samples", "uniform"] = "samples",
        directory: str | None = None,
    ) -> None:
        super().__init__(weighting)
        if personal is not None:
            check_unused("num_layers of FedPer", num_layers, 1, "where personal names the layers")
        self.personal, self.num_layers, self.directory = personal, num_layers, directory
        self._client = PersonalLayers("FedPer", directory, personal, num_layers)
