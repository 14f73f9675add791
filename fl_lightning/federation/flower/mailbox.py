# SPDX-License-Identifier: Apache-2.0
"""Messages to nodes and their replies, in whatever order these arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_lightning.lightning.names import rank_zero_warn

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

    Replies that nobody waits for (late, or a second time) are counted as ``strays`` and left alone.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self.strays = grid, 0
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
                self._stray(message)
            elif message.has_error():
                error = message.error
                own = message.metadata.src_node_id == node
                found[node] = Reply(failure=error.reason or f"Flower's error {error.code}", silent=not own)
            else:
                found[node] = Reply(message.content)
        return found

    def _stray(self, message: Message) -> None:
        self.strays += 1
        rank_zero_warn(
            f"a reply of node {message.metadata.src_node_id} is left alone: it is late, or came already "
            f"({self.strays} such replies so far)"
        )

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
        for node in self.forget():
            found[node] = Reply(failure=f"no reply within {timeout:g} s", silent=True)
        return found

    def forget(self) -> Iterable[int]:
        """Waits for nobody any more; returns the nodes that had not replied."""
        nodes = list(self._waiting.values())
        self._waiting.clear()
        return nodes
