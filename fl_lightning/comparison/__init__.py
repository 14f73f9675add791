# SPDX-License-Identifier: Apache-2.0
"""Methods, learning rates and seeds on one project: planned, carried out, resumed, and summed up in a table.

Uses every room but ``federation``.
"""

from fl_lightning.comparison.compare import compare
from fl_lightning.comparison.comparison import Comparison

__all__ = ["Comparison", "compare"]
