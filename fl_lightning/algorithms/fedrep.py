# SPDX-License-Identifier: Apache-2.0
"""FedRep: Exploiting Shared Representations for Personalized Federated Learning.

Liam Collins, Hamed Hassani, Aryan Mokhtari, Sanjay Shakkottai. ICML 2021. https://arxiv.org/abs/2102.07078
https://github.com/lgcollins/FedRep
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fl_lightning.algorithms._shared.personal_layers import PersonalLayers
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.records import ClientReport, LocalWork
from fl_lightning.arguments import FILLED, Bounds, checked


class FedRep(FedAvg):
    """A shared representation under heads that stay at their client; each client fits its head first (Algorithm 1).

    In its first ``head_epochs`` passes over its data a client trains its head on the representation that it received,
    and in the passes that are left the representation under that head. So the strategy needs more ``local_epochs`` than
    ``head_epochs``. Validation and test evaluate every client with its own head as well; what the module logs then
    stands under ``personal/<metric>``. The values without ``personal/`` are those of the trained representation under
    the head that training began with, and say little.

    Args:
        head: names of the submodules that stay at clients, with all that is below them; ``None``: the last one that
            owns trained parameters.
        head_epochs: passes that train the head; with 0 heads stay as training began with them.
        weighting: how the server weighs clients; alike in the paper.
        directory: where the clients' heads live in files; ``None``: in memory on the CPU and in the checkpoint.

    Raises:
        ValueError: ``head`` is empty, or ``head_epochs`` is negative.
    """

    @checked(head=FILLED, head_epochs=Bounds(0))
    def __init__(
        self,
        head: Sequence[str] | None = None,
        head_epochs: int = 10,
        weighting: Literal["samples", "uniform"] = "uniform",
        directory: str | None = None,
    ) -> None:
        super().__init__(weighting)
        self.head, self.head_epochs, self.directory = head, head_epochs, directory
        self._client = HeadFirst(head, head_epochs, directory)


class HeadFirst(PersonalLayers):
    """The head stays at its client, and is trained before the layers below; see :class:`FedRep` for the arguments."""

    def __init__(self, head: Sequence[str] | None, head_epochs: int, directory: str | None = None) -> None:
        super().__init__("FedRep", directory, head)
        self.head, self.head_epochs, self.fewest_epochs = head, head_epochs, head_epochs + 1
        self._heads: frozenset[str] = frozenset()
        self._passes = 0

    def begin_client(self, work: LocalWork) -> None:
        """Puts the client's head in the place of the one received."""
        super().begin_client(work)
        self._heads, self._passes = self.find(work.module, work.layout).parameters, 0

    def begin_batch(self, work: LocalWork, batch: Any, batch_idx: int) -> None:
        """Counts passes over the client's data."""
        self._passes += batch_idx == 0

    def correct_gradients(self, work: LocalWork) -> None:
        """Leaves the optimizer no gradients of the part that stands still in this pass."""
        heads_turn = self._passes <= self.head_epochs
        for name, parameter in zip(work.layout.names, work.parameters, strict=True):
            if (name in self._heads) != heads_turn:
                parameter.grad = None

    def end_client(self, work: LocalWork) -> ClientReport:
        """Keeps the client's head."""
        if self._passes <= self.head_epochs:
            raise ValueError(
                f"FedRep(head_epochs={self.head_epochs}) needs more passes than that over a client's data, found "
                f"{self._passes}: set local_epochs of the strategy to head_epochs plus those of the representation"
            )
        return super().end_client(work)
