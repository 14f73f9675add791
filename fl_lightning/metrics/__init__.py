# SPDX-License-Identifier: Apache-2.0
"""Fairness over clients and between groups of people: torchmetrics classes, and pure functions in ``functional``.

Uses ``arguments``.
"""

from fl_lightning.metrics import functional
from fl_lightning.metrics.by_group import ByGroup
from fl_lightning.metrics.client import BestFraction, ClientStd, FairnessAngle, WorstFraction
from fl_lightning.metrics.group_fairness import DemographicParity, EqualizedOdds, EqualOpportunity
from fl_lightning.metrics.group_frame import GroupFrame

__all__ = [
    "BestFraction", "ByGroup", "ClientStd", "DemographicParity", "EqualOpportunity", "EqualizedOdds", "FairnessAngle",
    "GroupFrame", "WorstFraction", "functional",
]  # fmt: skip
