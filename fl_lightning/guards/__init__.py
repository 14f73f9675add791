# SPDX-License-Identifier: Apache-2.0
"""Defences against dishonest clients: what happens to updates before any method sees them.

``FederatedStrategy(algorithm, guard=...)``. Uses ``core``, ``ops`` and the records of ``algorithms``.
"""

from __future__ import annotations

from fl_lightning.guards.base import CannotGuardError, Guard, Verdict
from fl_lightning.guards.krum import Krum, MultiKrum
from fl_lightning.guards.norms import AdaptiveNormClipping, NormClipping

__all__ = ["AdaptiveNormClipping", "CannotGuardError", "Guard", "Krum", "MultiKrum", "NormClipping", "Verdict"]
