# SPDX-License-Identifier: Apache-2.0
"""Defences against dishonest clients, before any method sees their updates: ``FederatedStrategy(guard=...)``."""

from fl_lightning.algorithms.guards import *  # noqa: F403
from fl_lightning.algorithms.guards import __all__ as __all__
