# SPDX-License-Identifier: Apache-2.0
"""FedBN: Federated Learning on Non-IID Features via Local Batch Normalization.

Xiaoxiao Li, Meirui Jiang, Xiaofei Zhang, Michael Kamp, Qi Dou. ICLR 2021. https://arxiv.org/abs/2102.07623
https://github.com/med-air/FedBN
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from fl_lightning.algorithms._shared.personal_layers import PersonalLayers, layers_of_type
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.arguments import checked
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.model_snapshot import Layers
from fl_lightning.core.modules import BatchNorm


class FedBN(FedAvg):
    """FedAvg on everything but BatchNorm layers, whose weights and statistics stay at their client (Algorithm 1).

    Validation and test evaluate every client with its own BatchNorm layers as well; what the module logs then stands
    under ``personal/<metric>``. The values without ``personal/`` are those of the global model with the BatchNorm
    layers that training began with, and say little.

    Args:
        weighting: how the server weighs clients; alike in the paper.
        directory: where the clients' layers live in files; ``None``: in memory on the CPU and in the checkpoint.
    """

    @checked()
    def __init__(self, weighting: Literal["samples", "uniform"] = "uniform", directory: str | None = None) -> None:
        super().__init__(weighting)
        self.directory = directory
        self._client = LocalNorms(directory)


class LocalNorms(PersonalLayers):
    """BatchNorm layers stay at their client."""

    def __init__(self, directory: str | None = None) -> None:
        super().__init__("FedBN", directory)

    def find(self, module: nn.Module, layout: ParamLayout) -> Layers:
        """All BatchNorm layers."""
        layers = layers_of_type(module, layout, BatchNorm)
        if not layers.parameters | layers.buffers:
            raise ValueError("FedBN needs a module with BatchNorm layers, found none")
        return layers
