# SPDX-License-Identifier: Apache-2.0
"""What people look at after a fit: its record in plain values, and a page with pictures of one or several records.

Uses ``lightning``, ``core``, ``metrics`` and ``arguments``.
"""

from fl_lightning.report.page import write_report
from fl_lightning.report.record import (
    Absence,
    ClientValues,
    FitRecord,
    MetricSeries,
    RoundSeries,
    record_from_json,
    record_to_json,
)

__all__ = [
    "Absence", "ClientValues", "FitRecord", "MetricSeries", "RoundSeries", "record_from_json", "record_to_json",
    "write_report",
]  # fmt: skip
