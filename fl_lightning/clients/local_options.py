# SPDX-License-Identifier: Apache-2.0
"""The options of local training in one frozen record."""

from __future__ import annotations

from dataclasses import dataclass

from fl_lightning.algorithms.attacks import Attack


@dataclass(frozen=True)
class LocalOptions:
    """The options of one client's local training, the same in every round.

    Attributes:
        seed: root of all local randomness.
        epochs: passes over the client's data, unless ``steps`` is given.
        steps: optimizer steps, the same for clients of any size.
        limit: batches per pass: a count, or a fraction of the client's batches (at least one).
        keep_optimizer: the client gets its optimizer's state of its last round back.
        loss_batch_size: samples per forward pass where losses are measured; ``None``: as in training.
        attack: what dishonest clients upload instead.
        planned: losses and gradients come from plans where they can.
    """

    seed: int = 0
    epochs: int = 1
    steps: int | None = None
    limit: int | float = 1.0
    keep_optimizer: bool = False
    loss_batch_size: int | None = None
    attack: Attack | None = None
    planned: bool = False

    def attack_of(self, client: int) -> Attack | None:
        """What this client does instead of what it should; ``None`` if it is honest."""
        return self.attack if self.attack is not None and client in self.attack.clients else None


def limited(limit: int | float, available: int) -> int:
    """How many of a client's ``available`` batches a limit leaves: a count, or a fraction that leaves at least one."""
    if isinstance(limit, int):
        return min(limit, available)
    return min(max(1, int(limit * available)), available)
