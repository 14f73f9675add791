# SPDX-License-Identifier: Apache-2.0
"""The strategy's arguments in one frozen record, checked where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, get_args, get_type_hints

from torch import nn
from torch.optim import Optimizer

from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.attacks import Attack
from fl_lightning.core.fit_description import plain
from fl_lightning.data.cohort_samplers import CohortSampler, check_clients_per_round
from fl_lightning.executors.base import Executor
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
    fairness_mode: Literal["max", "min"]
    on_client_error: Literal["raise", "drop"]
    attack: Attack | None
    seed: int
    executor: Executor
    loss_batch_size: int | None
    min_clients: int
    strict_resume: bool
    client_rule: ClientRule = field(init=False)

    def __post_init__(self) -> None:
        for name in ("full_gradients", "strict_resume"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, found {getattr(self, name)!r}")
        self._check_local_training()
        self._check_parts()
        for name, kind in get_type_hints(FitOptions).items():
            choice, allowed = getattr(self, name, None), get_args(kind)
            if getattr(kind, "__origin__", None) is Literal and choice not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, found {choice!r}")
        check_clients_per_round(self.clients_per_round)
        _check_count("min_clients", self.min_clients)
        if isinstance(self.clients_per_round, int):
            self.check_min_clients(self.clients_per_round)
        if self.loss_batch_size is not None and self.loss_batch_size < 1:
            raise ValueError(f"loss_batch_size must be positive, found {self.loss_batch_size}")
        object.__setattr__(self, "seed", int(self.seed))  # also where numpy drew it: checkpoints hold it
        rule = paired_client_rule(self.algorithm, self.client, self.full_gradients)
        object.__setattr__(self, "client_rule", rule)

    def _check_local_training(self) -> None:
        for name, value in (("local_epochs", self.local_epochs), ("local_steps", self.local_steps)):
            if not (value is None and name == "local_steps"):
                _check_count(name, value)
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

    def settings(self, cohort_size: int, full_gradients: bool) -> dict[str, Any]:
        """The options that change results, apart from the method, as plain values.

        Args:
            cohort_size: clients sampled per round.
            full_gradients: whether clients send gradients, by option or by method.
        """
        names = ("local_epochs", "local_steps", "client_optimizer_state", "buffers", "seed", "sampler", "attack")
        chosen = {name: plain(getattr(self, name)) for name in (*names, "min_clients", "loss_batch_size")}
        return {"clients_per_round": cohort_size, "full_gradients": full_gradients, **chosen}

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


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, found {value!r}")
