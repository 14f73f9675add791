# SPDX-License-Identifier: Apache-2.0
"""How the clients of a round are run, for ``FederatedStrategy(executor=...)``."""

from fl_lightning.clients.base import Sequential
from fl_lightning.clients.parallel import Parallel
from fl_lightning.federation.executor import Executor, Workers
from fl_lightning.federation.ray_executor import Ray

__all__ = ["Executor", "Parallel", "Ray", "Sequential", "Workers"]
