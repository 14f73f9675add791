# SPDX-License-Identifier: Apache-2.0
"""How the clients of a round are run, for ``FederatedStrategy(executor=...)``.

Uses ``training`` and the rooms below it: an executor sees single clients through ``training.ClientRunner`` alone.
"""

from fl_lightning.executors.base import CohortRunner, Executor
from fl_lightning.executors.parallel.executor import Parallel
from fl_lightning.executors.sequential import Sequential

__all__ = ["CohortRunner", "Executor", "Parallel", "Sequential"]
