# SPDX-License-Identifier: Apache-2.0
"""The options of local training in one frozen record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_lightning.algorithms.attacks import Attack


@dataclass(frozen=True)
class LocalOptions:
    """Those arguments of :class:`fl_lightning.FederatedStrategy` that local training reads itself."""

    seed: int
    local_epochs: int
    local_steps: int | None
    client_optimizer_state: Literal["reset", "keep"]
    loss_batch_size: int | None
    attack: Attack | None
    planned_steps: bool

    @property
    def keeps_optimizer(self) -> bool:
        """Whether clients get their optimizer's state of their last round back."""
        return self.client_optimizer_state == "keep"

    def attack_of(self, client: int) -> Attack | None:
        """What this client does instead of what it should; ``None`` if it is honest."""
        return self.attack if self.attack is not None and client in self.attack.clients else None


def limited(limit: int | float, available: int) -> int:
    """How many of a client's ``available`` batches a limit leaves: a count, or a fraction that leaves at least one."""
    if isinstance(limit, int):
        return min(limit, available)
    return min(max(1, int(limit * available)), available)
