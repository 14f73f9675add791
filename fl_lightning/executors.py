# SPDX-License-Identifier: Apache-2.0
"""How the clients of a round are run, for ``FederatedStrategy(executor=...)``."""

from fl_lightning.clients.base import CohortRunner, Executor, Sequential
from fl_lightning.clients.parallel import Parallel

__all__ = ["CohortRunner", "Executor", "Parallel", "Sequential"]
