# SPDX-License-Identifier: Apache-2.0
"""The strategy's arguments in one frozen record, checked where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import Optimizer

from fl_lightning.core.fit_description import plain
from fl_lightning.data.cohort_samplers import CohortSampler, check_clients_per_round
from fl_lightning.executors.base import Executor
from fl_lightning.metrics.functional import Mode
from fl_lightning.simulation.client_options import ClientOptions, check_count


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
    fairness_mode: Mode | Mapping[str, Mode]
    on_client_error: Literal["raise", "drop"]
    executor: Executor
    min_clients: int
    strict_resume: bool
    max_failed_rounds: int | None

    def __post_init__(self) -> None:
        per_metric = self.fairness_mode if isinstance(self.fairness_mode, Mapping) else {"": self.fairness_mode}
        for metric, mode in per_metric.items():
            if mode not in get_args(Mode):
                where = f"fairness_mode[{metric!r}]" if metric else "fairness_mode"
                raise ValueError(f"{where} must be one of {get_args(Mode)}, found {mode!r}")
        if self.server_optimizer is not None and not callable(self.server_optimizer):
            raise TypeError(
                "server_optimizer must be a function from parameters to an optimizer, such as "
                f"functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9), found {self.server_optimizer!r}"
            )
        self.check_kinds(
            ("sampler", self.sampler, CohortSampler, "a CohortSampler such as fl.data.UniformSampler()"),
            ("executor", self.executor, Executor, "an Executor such as fl.executors.Sequential()"),
        )
        if not isinstance(self.strict_resume, bool):
            raise TypeError(f"strict_resume must be True or False, found {self.strict_resume!r}")
        super().__post_init__()
        if self.server_optimizer is not None and self.needs.exact_step:
            raise ValueError(
                f"server_optimizer must be left out with {type(self.algorithm).__name__}, which goes back to earlier "
                f"parameters by steps of its own, found {self.server_optimizer!r}: it would take other steps"
            )
        check_clients_per_round(self.clients_per_round)
        check_count("min_clients", self.min_clients)
        if self.max_failed_rounds is not None:
            check_count("max_failed_rounds", self.max_failed_rounds)
        if isinstance(self.clients_per_round, int):
            self.check_min_clients(self.clients_per_round)

    def check_min_clients(self, cohort_size: int) -> None:
        """Raises ValueError if no round can have ``min_clients`` usable uploads.

        Args:
            cohort_size: clients sampled per round.
        """
        if self.min_clients > cohort_size:
            raise ValueError(
                f"min_clients must be at most the {cohort_size} clients sampled per round (clients_per_round="
                f"{self.clients_per_round}), found {self.min_clients}: no round would change the model"
            )

    def settings(self) -> dict[str, Any]:
        """Those of the clients, and what decides who takes part."""
        own = {name: plain(getattr(self, name)) for name in ("sampler", "attack", "min_clients")}
        return {**super().settings(), **own}
