# SPDX-License-Identifier: Apache-2.0
"""What decides how one client trains, in one frozen record."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.records import Needs
from fl_lightning.arguments import Bounds, Example, check_unused
from fl_lightning.clients.client_batches import LocalOptions
from fl_lightning.fit.checks import Method, paired_client_rule
from fl_lightning.lightning.fit_description import plain

CLIENT_CHECKS: dict[str, Bounds | Example] = {
    "algorithm": Example("fl.algorithms.FedLF()"),
    "local_epochs": Bounds(1),
    "local_steps": Bounds(1),
    "loss_batch_size": Bounds(1),
}
"""Of these arguments, wherever they are given."""


@dataclass(frozen=True)
class ClientOptions(LocalOptions):
    """The arguments that a client of a real federation has, too; see :class:`fl_lightning.FederatedStrategy`."""

    algorithm: ServerRule
    client: ClientRule | ServerRule | None
    full_gradients: bool
    buffers: Literal["mean", "global", "largest"]
    client_rule: ClientRule = field(init=False)  # that of client, or the algorithm's own

    def __post_init__(self) -> None:
        rule = paired_client_rule(self.algorithm, self.client, self.full_gradients)
        object.__setattr__(self, "client_rule", rule)
        if self.local_steps is not None:
            check_unused("local_epochs", self.local_epochs, 1, f"with local_steps={self.local_steps}")
        if self.needs.full_gradients:
            why = f"with {self.method.asking('full_gradients')}, which sends full gradients and trains nothing locally"
            check_unused("client_optimizer_state", self.client_optimizer_state, "reset", why)
        if self.needs.full_gradients and (self.local_epochs != 1 or self.local_steps is not None):
            asking = "full_gradients=True" if self.full_gradients else type(self.algorithm).__name__
            raise ValueError(
                f"{asking} trains nothing locally: leave local_epochs and local_steps out, "
                f"found local_epochs={self.local_epochs}, local_steps={self.local_steps}"
            )

    @property
    def needs(self) -> Needs:
        """What both halves of the method ask for."""
        return self.method.needs

    @cached_property
    def method(self) -> Method:
        """The method under the names that the user gave its halves."""
        server, given, rule = self.algorithm, self.algorithm if self.client is None else self.client, self.client_rule
        own = server.needs | Needs(full_gradients=self.full_gradients)
        return Method(type(server).__name__, type(given).__name__, own, own | rule.needs, rule)

    def settings(self) -> dict[str, Any]:
        """The options that change results, apart from the method, as plain values."""
        names = ("local_epochs", "local_steps", "client_optimizer_state", "buffers", "seed", "loss_batch_size")
        return {**{name: plain(getattr(self, name)) for name in names}, "full_gradients": self.needs.full_gradients}
