# SPDX-License-Identifier: Apache-2.0
"""Fairness over clients: pure functions in :mod:`fl_lightning.metrics.functional`, stateful torchmetrics classes.

Uses nothing else of this package.
"""

from fl_lightning.metrics import functional
from fl_lightning.metrics.client import BestFraction, ClientStd, FairnessAngle, WorstFraction
from fl_lightning.metrics.disparity import DemographicParityGap, EqualOpportunityGap

__all__ = [
    "BestFraction",
    "ClientStd",
    "DemographicParityGap",
    "EqualOpportunityGap",
    "FairnessAngle",
    "WorstFraction",
    "functional",
]
