# SPDX-License-Identifier: Apache-2.0
"""Callbacks that read a federated strategy's records: fairness curves, conflict counts, per-client tables, reports.

Uses the rest of ``report`` and the rooms below it.
"""

from fl_lightning.report.callbacks.client_table import ClientTable, format_client_table
from fl_lightning.report.callbacks.conflict_monitor import ConflictMonitor, ConflictSummary, RoundConflicts
from fl_lightning.report.callbacks.fairness_monitor import FairnessCurve, FairnessMonitor
from fl_lightning.report.callbacks.fit_recorder import FitRecorder
from fl_lightning.report.callbacks.report import Report

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
