# SPDX-License-Identifier: Apache-2.0
"""Methods, learning rates and seeds on one project: planned, carried out, resumed, summed up in a table, and audited.

Uses every room but ``federation``.
"""

from fl_lightning.comparison.audit import Audit, audit
from fl_lightning.comparison.compare import compare
from fl_lightning.comparison.comparison import Comparison

__all__ = ["Audit", "Comparison", "audit", "compare"]
