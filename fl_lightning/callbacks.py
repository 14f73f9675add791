# SPDX-License-Identifier: Apache-2.0
"""Callbacks that read a federated strategy's records: per-client tables, records of fits, reports."""

from fl_lightning.report.callbacks import *  # noqa: F403
from fl_lightning.report.callbacks import __all__ as __all__
