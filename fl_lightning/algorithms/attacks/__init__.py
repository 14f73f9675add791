# SPDX-License-Identifier: Apache-2.0
"""Dishonest clients, for robustness runs: ``FederatedStrategy(attack=...)``. Uses the rooms below ``algorithms``."""

from __future__ import annotations

from fl_lightning.algorithms.attacks.base import Attack, dishonest_clients
from fl_lightning.algorithms.attacks.colluding import ALIE, InnerProductManipulation
from fl_lightning.algorithms.attacks.labels import LabelFlip, TargetedScaling
from fl_lightning.algorithms.attacks.updates import (
    FalseReports,
    RandomModels,
    RandomUpdates,
    ScaledUpdates,
    ZeroUpdates,
)

__all__ = [
    "ALIE",
    "Attack",
    "FalseReports",
    "InnerProductManipulation",
    "LabelFlip",
    "RandomModels",
    "RandomUpdates",
    "ScaledUpdates",
    "TargetedScaling",
    "ZeroUpdates",
    "dishonest_clients",
]
