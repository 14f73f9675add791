# SPDX-License-Identifier: Apache-2.0
"""What a server knows of the clients that have introduced themselves, and whom it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fl_lightning.federation.door import MisfitError, read, said
from fl_lightning.federation.messages import ClientIntroduction
from fl_lightning.lightning.fit_description import FitDescription
from fl_lightning.lightning.names import rank_zero_warn

_MUST_AGREE = ("method", "arguments", "layout", "clients", "settings")
_OUTLIER = 100
"""A client says how long a round is to all others, too: so many times the median does not count."""
_WARNINGS = 32


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

    def num_samples(self, now: Mapping[int, int]) -> int | None:
        """Training samples of all clients; ``None`` if some are unknown.

        Args:
            now: by client, as it says in this round.
        """
        if len(self._known) < self._num_clients:
            return None
        return sum(now.get(client, known.size) for client, known in self._known.items())

    @property
    def steps_per_round(self) -> int | None:
        """Mean optimizer steps of a visit, rounded up, over the known clients with data; ``None`` without any."""
        steps = {client: known.steps for client, known in self._known.items() if known.steps > 0}
        most = _OUTLIER * median(steps.values()) if steps else 0
        odd = {client: number for client, number in steps.items() if number > most}
        if odd:
            rank_zero_warn(
                f"the length of a round must not follow clients {odd}, which say that they take more than {_OUTLIER} "
                "times as many steps as the median: it is the mean of the others"
            )
        usual = [number for client, number in steps.items() if client not in odd]
        return -(-sum(usual) // len(usual)) if usual else None

    def refusal(self, introduction: object) -> str | None:
        """Why a client cannot take part; ``None`` if it can."""
        try:
            found = read(ClientIntroduction, introduction)
        except MisfitError as flaw:
            return str(flaw)
        if found.client_id >= self._num_clients:
            return f"client ids go from 0 to {self._num_clients - 1}, found {found.client_id}"
        try:
            refused = self._differences(found)
        except Exception as error:  # whatever comes of comparing values of any kind
            return f"its description cannot be compared ({type(error).__name__}: {said(error)})"
        return said(f"from server to client, {'; '.join(refused)}") if refused else None

    def _differences(self, found: ClientIntroduction) -> list[str]:
        description = FitDescription.from_state_dict(found.description)
        differences = self._description.differences(description)
        refused = [differences[name] for name in _MUST_AGREE if name in differences]
        if ".lora_" in differences.get("layout", ""):
            refused.append("adapters: the mean of factors needs one rank and the same adapted layers on all sides")
        ours, theirs = (d.versions.get("fl_lightning") for d in (self._description, description))
        if ours != theirs:
            refused.append(f"version: fl_lightning {ours} became {theirs}")
        elif "versions" in differences:
            self._warn_of_versions(found.client_id, said(differences["versions"]))
        if found.frozen != self._frozen:
            refused.append("frozen parameters: other values; load the same pretrained weights on all sides")
        return refused

    def _warn_of_versions(self, client_id: int, words: str) -> None:
        if words not in self._warned and len(self._warned) < _WARNINGS:
            self._warned.add(words)
            rank_zero_warn(
                f"client {client_id} computes with other versions than the server ({words}): its numbers may differ in "
                "their last bits from those of a simulation"
            )

    def register(self, introduction: object) -> None:
        """Takes what a client says, instead of what it said before.

        Raises:
            ValueError: :meth:`refusal`.
        """
        found = read(ClientIntroduction, introduction)
        words = self.refusal(found)
        if words is not None:
            raise ValueError(f"client {found.client_id} cannot take part: {words}")
        self._known[found.client_id] = replace(found, description={})

    def resize(self, sizes: Mapping[int, int]) -> None:
        """Clients have other training samples than they said, because their data have grown since."""
        for client, size in sizes.items():
            if client in self._known:
                self._known[client] = replace(self._known[client], size=size)

    def state_dict(self) -> list[dict[str, Any]]:
        """What clients have said."""
        return [asdict(known) for known in self._known.values()]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._known = {entry["client_id"]: ClientIntroduction(**entry) for entry in state}
