# SPDX-License-Identifier: Apache-2.0
"""What decides how one client trains, in one frozen record, checked where it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, get_args, get_type_hints

from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.records import Needs
from fl_lightning.attacks import Attack
from fl_lightning.core.fit_description import plain
from fl_lightning.simulation.checks import Method, paired_client_rule
from fl_lightning.training.local_options import LocalOptions


@dataclass(frozen=True)
class ClientOptions:
    """The arguments that a client of a real federation has, too; see :class:`fl_lightning.FederatedStrategy`.

    Attributes:
        client_rule: the client half in use: that of ``client``, or the algorithm's own.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: an argument is out of range, or ``algorithm`` and ``client`` do not fit together.
    """

    algorithm: ServerRule
    client: ClientRule | ServerRule | None
    local_epochs: int
    local_steps: int | None
    full_gradients: bool
    client_optimizer_state: Literal["reset", "keep"]
    buffers: Literal["mean", "global", "largest"]
    attack: Attack | None
    seed: int
    loss_batch_size: int | None
    client_rule: ClientRule = field(init=False)

    def __post_init__(self) -> None:
        self._check_local_training()
        self.check_kinds(
            ("attack", self.attack, Attack, "an Attack such as fl.attacks.ZeroUpdates(clients=(3, 7))"),
            ("seed", self.seed, Integral, "an integer"),
        )
        for name, kind in get_type_hints(type(self)).items():
            choice, allowed = getattr(self, name, None), get_args(kind)
            if getattr(kind, "__origin__", None) is Literal and choice not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, found {choice!r}")
        if self.loss_batch_size is not None and self.loss_batch_size < 1:
            raise ValueError(f"loss_batch_size must be positive, found {self.loss_batch_size}")
        object.__setattr__(self, "seed", int(self.seed))  # also where numpy drew it: checkpoints hold it
        rule = paired_client_rule(self.algorithm, self.client, self.full_gradients)
        object.__setattr__(self, "client_rule", rule)
        self._check_full_gradients()

    def _check_local_training(self) -> None:
        for name, value in (("local_epochs", self.local_epochs), ("local_steps", self.local_steps)):
            if not (value is None and name == "local_steps"):
                check_count(name, value)
        if not isinstance(self.full_gradients, bool):
            raise TypeError(f"full_gradients must be True or False, found {self.full_gradients!r}")

    def _check_full_gradients(self) -> None:
        if self.needs.full_gradients and (self.local_epochs != 1 or self.local_steps is not None):
            asking = "full_gradients=True" if self.full_gradients else type(self.algorithm).__name__
            raise ValueError(
                f"{asking} trains nothing locally: leave local_epochs and local_steps out, "
                f"found local_epochs={self.local_epochs}, local_steps={self.local_steps}"
            )

    def check_kinds(self, *arguments: tuple[str, object, type, str]) -> None:
        """Checks arguments, each given as name, value, class and example.

        Raises:
            TypeError: one is of another class.
        """
        for name, value, kind, example in arguments:
            if not isinstance(value, kind) and not (name == "attack" and value is None):
                raise TypeError(f"{name} must be {example}, found {value!r}")

    @property
    def needs(self) -> Needs:
        """What both halves of the method ask for."""
        return self.algorithm.needs | self.client_rule.needs | Needs(full_gradients=self.full_gradients)

    @property
    def method(self) -> Method:
        """The method under the names that the user gave its halves."""
        server, given = self.algorithm, self.algorithm if self.client is None else self.client
        own = server.needs | Needs(full_gradients=self.full_gradients)
        return Method(type(server).__name__, type(given).__name__, own, self.needs, self.client_rule)

    @property
    def keeps_optimizer(self) -> bool:
        """Whether clients get their optimizer's state of their last round back."""
        return self.client_optimizer_state == "keep"

    def settings(self) -> dict[str, Any]:
        """The options that change results, apart from the method, as plain values."""
        names = ("local_epochs", "local_steps", "client_optimizer_state", "buffers", "seed", "loss_batch_size")
        return {**{name: plain(getattr(self, name)) for name in names}, "full_gradients": self.needs.full_gradients}

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
            keep_optimizer=self.keeps_optimizer,
            loss_batch_size=self.loss_batch_size,
            attack=self.attack,
        )


def check_count(name: str, value: object) -> None:
    """Requires a positive integer.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, found {value!r}")
