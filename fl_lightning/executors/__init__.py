# SPDX-License-Identifier: Apache-2.0
"""How the clients of a round are trained, for ``FederatedStrategy(executor=...)``."""

from fl_lightning.executors.base import Executor, Runner
from fl_lightning.executors.parallel.executor import Parallel
from fl_lightning.executors.sequential import Sequential

__all__ = ["Executor", "Parallel", "Runner", "Sequential"]
