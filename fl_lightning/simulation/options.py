# SPDX-License-Identifier: Apache-2.0
"""The strategy's arguments in one frozen record, checked where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from fl_lightning.data.cohort_samplers import CohortSampler, check_clients_per_round
from fl_lightning.executors.base import Executor
from fl_lightning.simulation.client_options import ClientOptions


@dataclass(frozen=True)
class FitOptions(ClientOptions):
    """What shapes a fit; see :class:`fl_lightning.FederatedStrategy`, whose arguments these are.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: an argument is out of range, or ``algorithm`` and ``client`` do not fit together.
    """

    clients_per_round: int | float
    server_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None
    sampler: CohortSampler
    fairness_metric: str | None
    fairness_mode: Literal["max", "min"]
    on_client_error: Literal["raise", "drop"]
    executor: Executor

    def __post_init__(self) -> None:
        if self.server_optimizer is not None and not callable(self.server_optimizer):
            raise TypeError(
                "server_optimizer must be a function from parameters to an optimizer, such as "
                f"functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9), found {self.server_optimizer!r}"
            )
        self.check_kinds(
            ("sampler", self.sampler, CohortSampler, "a CohortSampler such as fl.data.UniformSampler()"),
            ("executor", self.executor, Executor, "an Executor such as fl.executors.Sequential()"),
        )
        super().__post_init__()
        check_clients_per_round(self.clients_per_round)
