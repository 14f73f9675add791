# SPDX-License-Identifier: Apache-2.0
"""The strategy's arguments in one frozen record."""

from __future__ import annotations

from dataclasses import dataclass, field

from fl_lightning.attacks import Attack
from fl_lightning.data.cohort_samplers import CohortSampler
from fl_lightning.executors.base import Executor
from fl_lightning.executors.sequential import Sequential
from fl_lightning.simulation.server import OptimizerFactory
from fl_lightning.simulation.uploads import ErrorPolicy
from fl_lightning.training.buffers import BufferPolicy
from fl_lightning.training.local_plan import LocalPlan


@dataclass(frozen=True)
class FitOptions:
    """The strategy's arguments that shape a fit; see :class:`fl_lightning.FederatedStrategy`."""

    clients_per_round: int | float
    plan: LocalPlan
    sampler: CohortSampler
    server_optimizer: OptimizerFactory | None
    keep_client_optimizers: bool
    buffers: BufferPolicy
    on_client_error: ErrorPolicy
    seed: int
    executor: Executor = field(default_factory=Sequential)
    full_gradients: bool = False
    loss_batch_size: int | None = None
    attack: Attack | None = None
    lean: bool | None = None
