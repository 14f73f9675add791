# SPDX-License-Identifier: Apache-2.0
"""The nodes of a federation: which of them is which client, and messages to them with their replies."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fl_lightning.core.records import client_label
from fl_lightning.federation.federated_server import FederatedServer
from fl_lightning.federation.flower.messages import HELLO, Nothing, packed, taken, unpacked
from fl_lightning.federation.message_checks import MessageError, printable
from fl_lightning.federation.messages import ClientIntroduction
from fl_lightning.lightning.names import rank_zero_info, rank_zero_warn

_SHORT, _LONG = 0.1, 3.0
"""Seconds between two looks for replies: the first, and the longest; a look costs the SuperLink a query."""


@dataclass(frozen=True)
class Reply:
    """What came of a message."""

    content: RecordDict | None = None  # None if nothing usable came
    failure: str = ""
    silent: bool = False  # nothing came at all, not even an error of the client app


class Mailbox:
    """Sends one message per node and matches replies with them by the message that they reply to.

    Flower is asked for replies to messages whose time is not up. Of two replies to one message the first counts.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._waiting: dict[str, int] = {}

    def send(
        self, contents: Mapping[int, Callable[[], RecordDict]], kind: str, group: str, ttl: float | None
    ) -> dict[int, Reply]:
        """Sends messages; returns the nodes to which that was not possible.

        ``contents`` makes the content by node: a model may be large, so one is held at a time. ``group`` is Flower's
        name for what belongs together, here the round. After ``ttl`` seconds neither message nor reply counts;
        ``None``: Flower's twelve hours.
        """
        lost: dict[int, Reply] = {}
        for node, make in contents.items():
            ids = list(self._grid.push_messages([Message(make(), node, kind, ttl=ttl, group_id=group)]))
            if not ids or not ids[0]:
                lost[node] = Reply(failure="the SuperLink did not take its message", silent=True)
            else:
                self._waiting[ids[0]] = node
        return lost

    def look(self) -> dict[int, Reply]:
        """What has arrived by now."""
        found: dict[int, Reply] = {}
        if not self._waiting:
            return found
        for message in self._grid.pull_messages(list(self._waiting)):
            node = self._waiting.pop(message.metadata.reply_to_message_id, None)
            if node is None:
                continue
            if message.has_error():
                error = message.error
                own = message.metadata.src_node_id == node
                found[node] = Reply(failure=error.reason or f"Flower's error {error.code}", silent=not own)
            else:
                found[node] = Reply(message.content)
        return found

    def collect(self, timeout: float | None) -> dict[int, Reply]:
        """Waits until all replies are there or the time is up; nodes without a reply have it as their failure."""
        found: dict[int, Reply] = {}
        began, pause = time.monotonic(), _SHORT
        while True:
            found |= self.look()
            left = None if timeout is None else timeout - (time.monotonic() - began)
            if not self._waiting or (left is not None and left <= 0):
                break
            time.sleep(pause if left is None else min(pause, left))
            pause = min(1.5 * pause, _LONG)
        lost = {node: Reply(failure=f"no reply within {timeout:g} s", silent=True) for node in self._waiting.values()}
        self._waiting.clear()
        return found | lost


_PAUSE = 1.0


class Members:
    """Knows the node of every client that is connected.

    A node that Flower lists and that is not known yet is asked to introduce itself. It is refused, by name and with a
    warning, if it computes something else than the server. If it says that it is a client that another node is, it
    waits until that one has gone. After ``patience`` seconds a node is asked once more, and nobody waits for it.

    ``keys`` are public keys by client, in hexadecimal digits; a client that is not in it yet is bound to the key that
    it comes with first. With ``None``, keys do not count. ``besides`` is what every message holds.
    """

    def __init__(
        self,
        grid: Grid,
        server: FederatedServer,
        besides: Mapping[str, Any],
        patience: float,
        keys: dict[int, str] | None = None,
    ) -> None:
        self._grid, self._server, self._besides, self.keys = grid, server, besides, keys
        self._patience = patience
        self._mailbox = Mailbox(grid)
        self.nodes: dict[int, int] = {}  # of connected clients
        self._asked: dict[int, float] = {}  # until when
        self._slow: set[int] = set()
        self.refused: dict[int, str] = {}  # why, by connected node
        self._rivals: dict[int, ClientIntroduction] = {}

    def connected(self, wanted: Collection[int], fewest: int, timeout: float) -> dict[int, int]:
        """The node of each wanted client that is connected.

        Waits, at most so long, while there are fewer than ``fewest``, and while nodes that might be missing clients
        have not introduced themselves yet.
        """
        until, told = time.monotonic() + timeout, False
        while True:
            waiting = self.look()
            found = {client: self.nodes[client] for client in wanted if client in self.nodes}
            enough = len(found) == len(wanted) or (len(found) >= fewest and not waiting)
            if enough or time.monotonic() >= until:
                return found
            if not told:
                rank_zero_info(f"{len(found)} of {len(wanted)} clients are connected: waiting {timeout:g} s at most")
                told = True
            time.sleep(min(_PAUSE, max(until - time.monotonic(), 0.0)))

    def gather(self, fewest: int, timeout: float) -> None:
        """Waits at the beginning for all clients, at most so long; raises TimeoutError if fewer than wanted come."""
        everybody = self._server.num_clients
        self.connected(range(everybody), everybody, timeout)
        if len(self.nodes) < fewest:
            refused = "; ".join(f"node {node}: {why}" for node, why in self.refused.items())
            raise TimeoutError(
                f"{len(self.nodes)} of {everybody} clients have come within {timeout:g} s, and min_clients={fewest}"
                + (f"; refused were {refused}" if refused else "")
            )
        missing = sorted(set(range(everybody)) - self.nodes.keys())
        if missing:
            rank_zero_warn(f"{len(self.nodes)} of {everybody} clients have come; not yet: {missing}")

    def look(self) -> bool:
        """Notices nodes that have come or gone; returns whether introductions are still to come."""
        online = set(self._grid.get_node_ids())
        for client, node in list(self.nodes.items()):
            if node not in online:
                rank_zero_info(f"client {client_label(client, self._server.client_names)} is no longer connected")
                del self.nodes[client]
        self.refused = {node: why for node, why in self.refused.items() if node in online}
        self._rivals = {node: found for node, found in self._rivals.items() if node in online}
        for node, found in list(self._rivals.items()):
            if found.client_id not in self.nodes:
                del self._rivals[node]
                self._take(node, found)
        now = time.monotonic()
        overdue = {node for node, until in self._asked.items() if until < now}
        self._slow |= overdue
        fresh = sorted(online - {*self.nodes.values(), *self.refused, *self._rivals, *(self._asked.keys() - overdue)})
        hello = partial(packed, Nothing(), **self._besides)
        lost = self._mailbox.send(dict.fromkeys(fresh, hello), f"{MessageType.QUERY}.{HELLO}", "hello", None)
        self._asked |= dict.fromkeys(set(fresh) - lost.keys(), now + self._patience)
        for node, reply in self._mailbox.look().items():
            self._asked.pop(node, None)
            if node in online and node not in self.nodes.values() and not reply.silent:
                self._on_reply(node, reply)  # who could not be reached is asked again
        return bool((self._asked.keys() & online) - self._slow)

    def _on_reply(self, node: int, reply: Reply) -> None:
        if reply.content is None:
            self._refuse(node, reply.failure)
            return
        try:
            found = taken(ClientIntroduction, unpacked(reply.content))
        except MessageError as flaw:
            self._refuse(node, str(flaw))
            return
        if found.client_id in self.nodes:
            # A node that restarts without a registered key comes back under another id, before Flower misses the old.
            self._rivals[node] = found
            rank_zero_warn(
                f"node {node} says that it is client {found.client_id}, which node {self.nodes[found.client_id]} is: "
                "it takes part once that one has gone"
            )
            return
        self._take(node, found)

    def _take(self, node: int, found: ClientIntroduction) -> None:
        key = self._key(node)
        flaw, refusal = self._flaw(found, key), self._server.refusal(found)
        if flaw is not None or refusal is not None:
            self._refuse(node, flaw or f"it is client {found.client_id}; {refusal}")
            return
        self._server.register(found, by_name=self.keys is None)  # a key says whose an id is
        self.nodes[found.client_id] = node
        rank_zero_info(f"client {client_label(found.client_id, self._server.client_names)} is connected")
        if self.keys is not None:
            self.keys[found.client_id] = key

    def _refuse(self, node: int, why: str) -> None:
        self.refused[node] = printable(why)
        rank_zero_warn(f"node {node} cannot take part: {self.refused[node]}")

    def _key(self, node: int) -> str:
        """The public key of a node, in hexadecimal digits; empty where keys do not count."""
        if self.keys is None:
            return ""
        return next((bytes(found.public_key).hex() for found in self._grid.get_nodes() if found.node_id == node), "")

    def _flaw(self, found: ClientIntroduction, key: str) -> str | None:
        client = found.client_id
        if self.keys is not None and not key:
            return f"it has no registered key, and keys say who client {client} is"
        if self.keys is not None and self.keys.get(client, key) != key:
            return f"it says that it is client {client}, which has another key"
        return None
