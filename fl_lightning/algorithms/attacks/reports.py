# SPDX-License-Identifier: Apache-2.0
"""Clients that lie about numbers which methods weigh them by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_lightning.algorithms.attacks.base import Attack
from fl_lightning.arguments import Bounds, checked


@checked(clients=Bounds(0), loss_factor=Bounds(0), accuracy=Bounds(0, 1))
@dataclass(frozen=True)
class FalseReports(Attack):
    """The loss times a factor, and another accuracy; the update is honest.

    A client that reports a large loss or a low accuracy gains weight with every method that helps clients which fare
    badly. Methods that ask for neither do not notice this attack.

    Attributes:
        clients: ids of the dishonest clients.
        loss_factor: what a loss at given parameters is multiplied by.
        accuracy: what is reported as accuracy; ``None``: the truth.

    Raises:
        ValueError: ``loss_factor`` is negative or not finite, or ``accuracy`` is no share.
    """

    clients: Sequence[int]
    loss_factor: float = 10.0
    accuracy: float | None = 0.0

    def report(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Changes both numbers."""
        told = dict(measured)
        if "loss" in told:
            told["loss"] *= self.loss_factor
        if "accuracy" in told and self.accuracy is not None:
            told["accuracy"] = self.accuracy
        return told
