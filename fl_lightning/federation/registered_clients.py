# SPDX-License-Identifier: Apache-2.0
"""What a server knows of the clients that have introduced themselves, and whom it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fl_lightning.arguments import altered, trusted
from fl_lightning.core.cohort import mean_rate
from fl_lightning.core.storage.declared import renumbered
from fl_lightning.core.storage.rule_state import has_local_state
from fl_lightning.federation.message_checks import OUTLIER, MessageError, outliers, printable, read
from fl_lightning.federation.messages import ClientIntroduction, ClientMessage
from fl_lightning.fit.options import FitOptions
from fl_lightning.fit.server import Server
from fl_lightning.lightning.fit_description import FitDescription
from fl_lightning.lightning.names import rank_zero_warn

_MUST_AGREE = ("method", "arguments", "layout", "clients", "settings")
_WARNINGS = 32


class RegisteredClients:
    """The clients of a federation as they have introduced themselves to a server of this kind."""

    num_clients: int
    fit_description: FitDescription
    _frozen: str
    """Digest of the server's parameters without gradients."""
    _server: Server
    options: FitOptions

    def __init__(self) -> None:
        self._known: dict[int, ClientIntroduction] = {}  # those of a checkpoint, too, also with ids beyond all others
        self._heard: set[int] = set()  # those that have introduced themselves to this object
        self._ready = self._changed = False
        self._warned: set[str] = set()
        self.counted: dict[int, int] = {}  # by client, the last round in which its answer entered the step
        self.learning_rate: float | None = None  # mean of the clients in the last round
        self._local_steps = 0

    @property
    def registered(self) -> frozenset[int]:
        """The clients that have introduced themselves."""
        return frozenset(client for client in self._known if client < self.num_clients)

    @property
    def client_names(self) -> Sequence[str]:
        """What people call the clients; numbers, as long as they do not say."""
        return tuple(self._known[k].name if k in self._known else str(k) for k in range(self.num_clients))

    @property
    def client_sizes(self) -> Tensor:
        """``[N]`` int64 training samples; 0 for clients that have not introduced themselves."""
        sizes = [self._known[k].size if k in self._known else 0 for k in range(self.num_clients)]
        return torch.tensor(sizes, dtype=torch.int64)

    def _num_samples(self, now: Mapping[int, int]) -> int | None:
        """Training samples of all clients, by what some say in this round; ``None`` if some are unknown."""
        if len(self.registered) < self.num_clients:
            return None
        return sum(now.get(client, self._known[client].size) for client in self.registered)

    def _mean_steps(self) -> int | None:
        """Mean optimizer steps of a visit, rounded up, over the known clients with data; ``None`` without any."""
        steps = {client: self._known[client].steps for client in self.registered if self._known[client].steps > 0}
        odd, _ = outliers(steps)
        if odd:
            rank_zero_warn(
                f"the length of a round must not follow clients {odd}, which say that they take more than {OUTLIER} "
                "times as many steps as the median: it is the mean of the others"
            )
        usual = [number for client, number in steps.items() if client not in odd]
        return -(-sum(usual) // len(usual)) if usual else None

    def refusal(self, introduction: ClientIntroduction | Mapping[str, Any]) -> str | None:
        """Why this client cannot take part, in words: another layout, method, setting, version; ``None`` if it can.

        Args:
            introduction: what came from it: a message, or its fields.
        """
        try:
            found = read(ClientIntroduction, introduction)
        except MessageError as flaw:
            return str(flaw)
        if found.client_id >= self.num_clients:
            return f"client ids go from 0 to {self.num_clients - 1}, found {found.client_id}"
        try:
            refused = self._differences(found)
        except Exception as error:  # whatever comes of comparing values of any kind
            return f"its description cannot be compared ({type(error).__name__}: {printable(error)})"
        keeps = has_local_state(self.options.client_rule) or self.options.keeps_optimizer
        if not refused and keeps and self._place(found) != found.client_id:
            return printable(
                f"client {found.client_id} or the name {found.name!r} is another one in the checkpoint, and what "
                "clients keep lies under their ids: let each have its id of before, and new ones others"
            )
        return printable(f"from server to client, {'; '.join(refused)}") if refused else None

    def _place(self, found: ClientIntroduction) -> int:
        """The id under which a checkpoint has what it holds of this client, by its name."""
        client, held = found.client_id, self._known.get(found.client_id)
        if client in self._heard or (held is not None and held.name == found.name):
            return client
        places = [k for k, known in self._known.items() if known.name == found.name and k not in self._heard]
        unused = client if held is None else max(self.num_clients, *self._known) + 1
        return places[0] if places else unused

    def _differences(self, found: ClientIntroduction) -> list[str]:
        own, description = self.fit_description, FitDescription.from_state_dict(found.description)
        differences = own.differences(description)
        refused = [differences[name] for name in _MUST_AGREE if name in differences]
        if ".lora_" in differences.get("layout", ""):
            refused.append("adapters: the mean of factors needs one rank and the same adapted layers on all sides")
        ours, theirs = (d.versions.get("fl_lightning") for d in (own, description))
        if ours != theirs:
            refused.append(f"version: fl_lightning {ours} became {theirs}")
        elif "versions" in differences:
            words = printable(differences["versions"])
            if words not in self._warned and len(self._warned) < _WARNINGS:
                self._warned.add(words)
                rank_zero_warn(
                    f"client {found.client_id} computes with other versions or kernels than the server ({words}): its "
                    "numbers may differ in their last bits from those of a simulation"
                )
        if found.frozen != self._frozen:
            refused.append("frozen parameters: other values; load the same pretrained weights on all sides")
        return refused

    def register(self, introduction: ClientIntroduction | Mapping[str, Any], by_name: bool = True) -> None:
        """Takes a client into the federation, or what it says anew.

        Args:
            introduction: as in :meth:`refusal`.
            by_name: what a checkpoint holds of the client of this name is its own, whatever its id was; ``False``: what
                it holds of its id.

        Raises:
            ValueError: :meth:`refusal`.
        """
        found = read(ClientIntroduction, introduction)
        words = self.refusal(found)
        if words is not None:
            raise ValueError(f"client {found.client_id} cannot take part: {words}")
        place = self._place(found) if by_name else found.client_id
        if place != found.client_id:
            ids = {found.client_id: place, place: found.client_id}
            self._server.load(self._server.states(), ids)
            self._known, self.counted = renumbered(self._known, ids), renumbered(self.counted, ids)
            self._ready, self._changed = False, True
        held = self._known.get(found.client_id)
        self._changed |= held is not None and held.size != found.size
        self._heard.add(found.client_id)
        self._known[found.client_id] = altered(found, description={})

    def _counts(self, answers: Sequence[ClientMessage], index: int) -> None:
        """Answers have entered the step of a round. Clients may have other samples than they said: data grow."""
        for answer in answers:
            client = answer.client_id
            self.counted[client] = index
            self._local_steps += answer.steps
            if client in self._known and self._known[client].size != answer.size:
                self._known[client] = altered(self._known[client], size=answer.size)
        rates = [answer.client_lr for answer in answers if answer.client_lr is not None]
        self.learning_rate = trusted(mean_rate)(rates) if rates else None

    def _clients_state(self) -> dict[str, Any]:
        clients = [{**asdict(known), "client_id": client} for client, known in self._known.items()]
        return {"counted": dict(self.counted), "local_steps": self._local_steps, "clients": clients}

    def _load_clients(self, state: Mapping[str, Any]) -> None:
        self.counted, self._local_steps = dict(state["counted"]), state["local_steps"]
        self._known = {entry["client_id"]: ClientIntroduction(**entry) for entry in state["clients"]}
