# SPDX-License-Identifier: Apache-2.0
"""Small convex problems that server rules solve in coefficient space."""

from fl_lightning.ops.solvers import *  # noqa: F403
from fl_lightning.ops.solvers import __all__ as __all__
