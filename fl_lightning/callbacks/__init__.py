# SPDX-License-Identifier: Apache-2.0
"""Callbacks that read a federated strategy's records: fairness curves, conflict counts, per-client tables.

Uses ``core`` and ``metrics``.
"""

from fl_lightning.callbacks.client_table import ClientTable, format_client_table
from fl_lightning.callbacks.conflict_monitor import ConflictMonitor, ConflictSummary, RoundConflicts
from fl_lightning.callbacks.fairness_monitor import FairnessCurve, FairnessMonitor

__all__ = [
    "ClientTable",
    "ConflictMonitor",
    "ConflictSummary",
    "FairnessCurve",
    "FairnessMonitor",
    "RoundConflicts",
    "format_client_table",
]
