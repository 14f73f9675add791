# SPDX-License-Identifier: Apache-2.0
"""What a server knows of the clients that have introduced themselves, and whom it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.fit_description import FitDescription
from fl_lightning.core.lightning.names import rank_zero_warn
from fl_lightning.simulation.federation_messages import ClientIntroduction

_MUST_AGREE = ("method", "arguments", "layout", "clients", "settings")


class Introductions:
    """The clients of a federation as they have introduced themselves.

    Args:
        num_clients: registered clients.
        description: of the server.
        frozen: digest of the server's parameters without gradients.
    """

    def __init__(self, num_clients: int, description: FitDescription, frozen: str) -> None:
        self._num_clients, self._description, self._frozen = num_clients, description, frozen
        self._known: dict[int, ClientIntroduction] = {}
        self._warned: set[str] = set()

    @property
    def known(self) -> frozenset[int]:
        """The clients that have introduced themselves."""
        return frozenset(self._known)

    @property
    def names(self) -> Sequence[str]:
        """What people call the clients."""
        return tuple(self._known[k].name if k in self._known else str(k) for k in range(self._num_clients))

    @property
    def sizes(self) -> Tensor:
        """``[N]`` int64 training samples; 0 for unknown clients."""
        sizes = [self._known[k].size if k in self._known else 0 for k in range(self._num_clients)]
        return torch.tensor(sizes, dtype=torch.int64)

    @property
    def num_samples(self) -> int | None:
        """Training samples of all clients; ``None`` if some are unknown."""
        return int(self.sizes.sum()) if len(self._known) == self._num_clients else None

    @property
    def steps_per_round(self) -> int | None:
        """Mean optimizer steps of a visit, rounded up, over the known clients with data; ``None`` without any."""
        steps = [known.steps for known in self._known.values() if known.steps > 0]
        return -(-sum(steps) // len(steps)) if steps else None

    def refusal(self, found: ClientIntroduction) -> str | None:
        """Why a client cannot take part; ``None`` if it can."""
        if found.client_id >= self._num_clients:
            return f"client ids go from 0 to {self._num_clients - 1}, found {found.client_id}"
        description = FitDescription.from_state_dict(found.description)
        differences = self._description.differences(description)
        refused = [differences[name] for name in _MUST_AGREE if name in differences]
        ours, theirs = (d.versions.get("fl_lightning") for d in (self._description, description))
        if ours != theirs:
            refused.append(f"version: fl_lightning {ours} became {theirs}")
        elif "versions" in differences and differences["versions"] not in self._warned:
            self._warned.add(differences["versions"])
            rank_zero_warn(
                f"client {found.client_id} computes with other versions than the server ({differences['versions']}): "
                "its numbers may differ in their last bits from those of a simulation"
            )
        if found.frozen != self._frozen:
            refused.append("frozen parameters: other values; load the same pretrained weights on all sides")
        return f"from server to client, {'; '.join(refused)}" if refused else None

    def register(self, found: ClientIntroduction) -> None:
        """Takes what a client says, instead of what it said before.

        Raises:
            ValueError: :meth:`refusal`.
        """
        words = self.refusal(found)
        if words is not None:
            raise ValueError(f"client {found.client_id} cannot take part: {words}")
        self._known[found.client_id] = found

    def resize(self, client_id: int, size: int) -> None:
        """A client has other training samples than it said, because its data have grown since."""
        if client_id in self._known and self._known[client_id].size != size:
            self._known[client_id] = replace(self._known[client_id], size=size)

    def state_dict(self) -> list[dict[str, Any]]:
        """What clients have said."""
        return [{**asdict(known), "description": {}} for known in self._known.values()]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._known = {entry["client_id"]: ClientIntroduction(**entry) for entry in state}
