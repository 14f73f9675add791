# SPDX-License-Identifier: Apache-2.0
"""Small convex problems that server rules solve in coefficient space.

Uses ``ops`` and ``arguments``.
"""

from __future__ import annotations

from fl_lightning.ops.solvers.dual_cone import dual_cone
from fl_lightning.ops.solvers.linear_program import LinearProgram, linear_program
from fl_lightning.ops.solvers.simplex import box_min_norm, min_norm, project_simplex

__all__ = ["LinearProgram", "box_min_norm", "dual_cone", "linear_program", "min_norm", "project_simplex"]
