# SPDX-License-Identifier: Apache-2.0
"""Callbacks that read a federated strategy's records: fairness curves, conflict counts, per-client tables, reports.

Uses ``report``, ``core``, ``metrics`` and ``arguments``.
"""

from fl_lightning.callbacks.client_table import ClientTable, format_client_table
from fl_lightning.callbacks.conflict_monitor import ConflictMonitor, ConflictSummary, RoundConflicts
from fl_lightning.callbacks.fairness_monitor import FairnessCurve, FairnessMonitor
from fl_lightning.callbacks.fit_recorder import FitRecorder
from fl_lightning.callbacks.report import Report

__all__ = [
    "ClientTable",
    "ConflictMonitor",
    "ConflictSummary",
    "FairnessCurve",
    "FairnessMonitor",
    "FitRecorder",
    "Report",
    "RoundConflicts",
    "format_client_table",
]
