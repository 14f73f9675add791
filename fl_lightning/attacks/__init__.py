# SPDX-License-Identifier: Apache-2.0
"""Dishonest clients, for robustness runs: ``FederatedStrategy(attack=...)``. Uses ``core`` and ``arguments``."""

from __future__ import annotations

from fl_lightning.attacks.base import Attack, dishonest_clients
from fl_lightning.attacks.colluding import ALIE, InnerProductManipulation
from fl_lightning.attacks.labels import LabelFlip, TargetedScaling
from fl_lightning.attacks.reports import FalseReports
from fl_lightning.attacks.updates import RandomModels, RandomUpdates, ScaledUpdates, ZeroUpdates

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
