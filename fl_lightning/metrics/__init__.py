# SPDX-License-Identifier: Apache-2.0
"""Fairness over clients: pure functions in :mod:`fl_lightning.metrics.functional`, stateful torchmetrics classes."""

from fl_lightning.metrics import functional
from fl_lightning.metrics.client import BestFraction, ClientStd, FairnessAngle, WorstFraction

__all__ = ["BestFraction", "ClientStd", "FairnessAngle", "WorstFraction", "functional"]
