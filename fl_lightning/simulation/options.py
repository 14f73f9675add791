# SPDX-License-Identifier: Apache-2.0
"""The strategy's arguments in one frozen record, checked where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal, get_args, get_type_hints

from torch import nn
from torch.optim import Optimizer

from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.attacks import Attack
from fl_lightning.data.cohort_samplers import CohortSampler, check_clients_per_round
from fl_lightning.executors.base import Executor
from fl_lightning.metrics.functional import Mode
from fl_lightning.simulation.checks import paired_client_rule
from fl_lightning.training.local_options import LocalOptions


@dataclass(frozen=True)
class FitOptions:
    """What shapes a fit; see :class:`fl_lightning.FederatedStrategy`, whose arguments these are.

    Attributes:
        client_rule: the client half in use: that of ``client``, or the algorithm's own.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: an argument is out of range, or ``algorithm`` and ``client`` do not fit together.
    """

    algorithm: ServerRule
    client: ClientRule | ServerRule | None
    clients_per_round: int | float
    local_epochs: int
    local_steps: int | None
    full_gradients: bool
    server_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None
    sampler: CohortSampler
    client_optimizer_state: Literal["reset", "keep"]
    buffers: Literal["mean", "global", "largest"]
    fairness_metric: str | None
    fairness_mode: Mode | Mapping[str, Mode]
    on_client_error: Literal["raise", "drop"]
    attack: Attack | None
    seed: int
    executor: Executor
    loss_batch_size: int | None
    client_rule: ClientRule = field(init=False)

    def __post_init__(self) -> None:
        self._check_local_training()
        self._check_parts()
        for name, kind in get_type_hints(FitOptions).items():
            choice, allowed = getattr(self, name, None), get_args(kind)
            if getattr(kind, "__origin__", None) is Literal and choice not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, found {choice!r}")
        per_metric = self.fairness_mode if isinstance(self.fairness_mode, Mapping) else {"": self.fairness_mode}
        for metric, mode in per_metric.items():
            if mode not in get_args(Mode):
                where = f"fairness_mode[{metric!r}]" if metric else "fairness_mode"
                raise ValueError(f"{where} must be one of {get_args(Mode)}, found {mode!r}")
        check_clients_per_round(self.clients_per_round)
        if self.loss_batch_size is not None and self.loss_batch_size < 1:
            raise ValueError(f"loss_batch_size must be positive, found {self.loss_batch_size}")
        object.__setattr__(self, "seed", int(self.seed))  # also where numpy drew it: checkpoints hold it
        rule = paired_client_rule(self.algorithm, self.client, self.full_gradients)
        object.__setattr__(self, "client_rule", rule)

    def _check_local_training(self) -> None:
        for name, value in (("local_epochs", self.local_epochs), ("local_steps", self.local_steps)):
            absent = value is None and name == "local_steps"
            if not absent and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer, found {value!r}")
        if not isinstance(self.full_gradients, bool):
            raise TypeError(f"full_gradients must be True or False, found {self.full_gradients!r}")
        if self.full_gradients and (self.local_epochs != 1 or self.local_steps is not None):
            raise ValueError(
                "full_gradients=True trains nothing locally: leave local_epochs and local_steps out, "
                f"found local_epochs={self.local_epochs}, local_steps={self.local_steps}"
            )

    def _check_parts(self) -> None:
        if self.server_optimizer is not None and not callable(self.server_optimizer):
            raise TypeError(
                "server_optimizer must be a function from parameters to an optimizer, such as "
                f"functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9), found {self.server_optimizer!r}"
            )
        for name, value, kind, example in (
            ("sampler", self.sampler, CohortSampler, "a CohortSampler such as fl.data.UniformSampler()"),
            ("attack", self.attack, Attack, "an Attack such as fl.attacks.ZeroUpdates(clients=(3, 7))"),
            ("seed", self.seed, Integral, "an integer"),
            ("executor", self.executor, Executor, "an Executor such as fl.executors.Sequential()"),
        ):
            if not isinstance(value, kind) and not (name == "attack" and value is None):
                raise TypeError(f"{name} must be {example}, found {value!r}")

    def local(self, limit: int | float) -> LocalOptions:
        """The options of local training.

        Args:
            limit: the trainer's ``limit_train_batches``.
        """
        return LocalOptions(
            seed=self.seed,
            epochs=self.local_epochs,
            steps=self.local_steps,
            limit=limit,
            keep_optimizer=self.client_optimizer_state == "keep",
            loss_batch_size=self.loss_batch_size,
            attack=self.attack,
        )
