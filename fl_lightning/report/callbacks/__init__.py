# SPDX-License-Identifier: Apache-2.0
"""Callbacks that read a federated strategy's records: per-client tables, records of fits, reports.

Uses the rest of ``report`` and the rooms below it.
"""

from fl_lightning.report.callbacks.client_table import ClientTable, format_client_table
from fl_lightning.report.callbacks.fit_recorder import FitRecorder, Report

__all__ = ["ClientTable", "FitRecorder", "Report", "format_client_table"]
