# SPDX-License-Identifier: Apache-2.0
"""Checks for what you write yourself: rules, executors, partitions. They need no test framework.

Uses ``federation``, ``fit`` and the rooms below.
"""

from fl_lightning.testing.fits import check_client_rule, check_executor
from fl_lightning.testing.partitions import check_partition
from fl_lightning.testing.server_rules import SERVER_RULE_CHECKS, check_server_rule

__all__ = ["SERVER_RULE_CHECKS", "check_client_rule", "check_executor", "check_partition", "check_server_rule"]
