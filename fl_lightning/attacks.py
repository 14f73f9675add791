# SPDX-License-Identifier: Apache-2.0
"""Dishonest clients, for robustness runs: ``FederatedStrategy(attack=...)``."""

from fl_lightning.algorithms.attacks import *  # noqa: F403
from fl_lightning.algorithms.attacks import __all__ as __all__
