# SPDX-License-Identifier: Apache-2.0
"""How the clients of a round are trained, for ``FederatedStrategy(executor=...)``."""

from fl_lightning.executors.base import Crew, Executor
from fl_lightning.executors.parallel import Parallel
from fl_lightning.executors.sequential import Sequential

__all__ = ["Crew", "Executor", "Parallel", "Sequential"]
