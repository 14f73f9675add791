# SPDX-License-Identifier: Apache-2.0
"""Federated methods, one file each: a server rule, with its client rule where local training changes."""

from __future__ import annotations

from fl_lightning.algorithms.base import (
    ClientReport,
    ClientRule,
    Federation,
    LocalWork,
    Needs,
    ServerRule,
    StepReport,
    data_weights,
    uniform_weights,
)
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.algorithms.fedfv import FedFV
from fl_lightning.algorithms.fedheal import FedHEAL
from fl_lightning.algorithms.fedlf import FedLF
from fl_lightning.algorithms.fedmdfg import FedMDFG
from fl_lightning.algorithms.fedmgda import FedMGDAPlus
from fl_lightning.algorithms.fedprox import FedProx
from fl_lightning.algorithms.moon import MOON
from fl_lightning.algorithms.scaffold import SCAFFOLD

__all__ = [
    "MOON",
    "SCAFFOLD",
    "ClientReport",
    "ClientRule",
    "FedAvg",
    "FedDyn",
    "FedFV",
    "FedHEAL",
    "FedLF",
    "FedMDFG",
    "FedMGDAPlus",
    "FedProx",
    "Federation",
    "LocalWork",
    "Needs",
    "ServerRule",
    "StepReport",
    "data_weights",
    "uniform_weights",
]
