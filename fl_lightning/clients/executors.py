# SPDX-License-Identifier: Apache-2.0
"""How the clients of a round are run, for ``FederatedStrategy(executor=...)``."""

from fl_lightning.clients.base import CohortRunner, Executor
from fl_lightning.clients.sequential import Sequential
from fl_lightning.clients.workers.runner import Parallel

__all__ = ["CohortRunner", "Executor", "Parallel", "Sequential"]
