# SPDX-License-Identifier: Apache-2.0
"""Federated methods, one per file."""

from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.fedavg import FedAvg

__all__ = ["FedAvg", "ServerRule"]
