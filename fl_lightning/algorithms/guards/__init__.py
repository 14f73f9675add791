# SPDX-License-Identifier: Apache-2.0
"""Defences against dishonest clients: what happens to updates before any method sees them.

``FederatedStrategy(algorithm, guard=...)``. Uses the records of ``algorithms``, and the rooms below.
"""

from __future__ import annotations

from fl_lightning.algorithms.guards.base import CannotGuardError, Guard, Verdict
from fl_lightning.algorithms.guards.bulyan import Bulyan
from fl_lightning.algorithms.guards.centred_clipping import CentredClipping
from fl_lightning.algorithms.guards.coordinates import CoordinateMedian, TrimmedMean
from fl_lightning.algorithms.guards.cosine_trust import CosineTrust
from fl_lightning.algorithms.guards.geometric_median import GeometricMedian
from fl_lightning.algorithms.guards.krum import Krum, MultiKrum
from fl_lightning.algorithms.guards.norms import AdaptiveNormClipping, NormClipping

__all__ = [
    "AdaptiveNormClipping",
    "Bulyan",
    "CannotGuardError",
    "CentredClipping",
    "CoordinateMedian",
    "CosineTrust",
    "GeometricMedian",
    "Guard",
    "Krum",
    "MultiKrum",
    "NormClipping",
    "TrimmedMean",
    "Verdict",
]
