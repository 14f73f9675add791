# SPDX-License-Identifier: Apache-2.0
"""Flower's messages between a server and client apps of one process: every message is serialised and parsed again."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from by_hand import WithTests
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from support import Classifier, fresh

import fl_lightning as fl
from fl_lightning.federation.flower import FairStrategy, lightning_client_app

try:  # releases before 1.30 have none: they fill messages in when these are sent
    from flwr.supercore.task_identity import TaskIdentity
except ImportError:
    TaskIdentity = None

SUPERLINK = 1


def over_the_wire(message: Message) -> Message:
    """The message as it arrives, under the id that its content gives it."""
    objects = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    name = message.object_id
    arrived = inflate_object_from_contents(name, objects)
    arrived.metadata.__dict__["_message_id"] = name
    return arrived


class InProcess(Grid):
    """A grid whose nodes are client apps. Replies come in the reverse order of the messages.

    Args:
        apps: by node.
        configs: the nodes' configurations.
        lose: told of every message and its reply, gives the replies that arrive in its stead.
    """

    def __init__(
        self,
        apps: dict[int, ClientApp],
        configs: dict[int, dict[str, Any]],
        lose: Callable[[Message, Message], list[Message]] | None = None,
    ) -> None:
        self.apps, self.configs, self.lose = apps, configs, lose
        self.online = set(apps)
        self.keys: dict[int, bytes] = {}
        self.sent: list[Message] = []
        self._inbox: list[Message] = []
        if TaskIdentity is not None:
            TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, SUPERLINK, 1

    def set_run(self, run) -> None:
        pass

    @property
    def run(self):
        return None

    def create_message(self, *args, **kwargs):
        raise AssertionError("the strategy must not use it")

    def get_node_ids(self):
        return sorted(self.online)

    def get_nodes(self):
        from flwr.proto.node_pb2 import NodeInfo

        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in sorted(self.online)]

    def push_messages(self, messages):
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        order = over_the_wire(message)
        self.sent.append(order)
        node = order.metadata.dst_node_id
        if node in self.online:
            context = Context(7, node, self.configs[node], RecordDict(), {})
            reply = over_the_wire(self.apps[node](order, context))
        else:
            reply = unavailable(order)
        self._inbox += [reply] if self.lose is None else self.lose(order, reply)
        return order.metadata.message_id

    def pull_messages(self, message_ids):
        """Those that were asked for."""
        wanted = set(message_ids)
        arrived = [m for m in self._inbox[::-1] if m.metadata.reply_to_message_id in wanted]
        self._inbox = [m for m in self._inbox if m not in arrived]
        return arrived

    def send_and_receive(self, messages, *, timeout=None):
        raise AssertionError("the strategy must not use it")


def unavailable(order: Message) -> Message:
    """What the SuperLink answers for a node that has gone: from itself."""
    reply = Message(Error(5, "the node is unavailable"), reply_to=order)
    reply.metadata.__dict__["_src_node_id"] = SUPERLINK
    return over_the_wire(reply)


def client_app(tmp_path, strategy, module=Classifier, options=None, trainer=None) -> ClientApp:
    """An app for every node; its models begin with other weights than the server's."""
    return lightning_client_app(
        model=lambda: fresh(module, 77, **(options or {})),
        data=lambda context: WithTests(int(context.node_config["client-id"])),
        strategy=strategy, trainer=trainer or {"accelerator": "cpu"}, state_dir=tmp_path / "state",
    )  # fmt: skip


def of_flower(options: dict[str, Any]) -> dict[str, Any]:
    """Takes those options out that Flower's strategy has and ours has not."""
    return {name: options.pop(name) for name in list(options) if name in signature(FairStrategy).parameters}


def federation(tmp_path, algorithm, rounds=3, module=Classifier, options=None, lose=None, clients=4, client=None,
               trainer=None, apps=None, **more):  # fmt: skip
    """Runs a server and its nodes, with further options of both strategies; returns Flower's and the grid."""
    own, more = {"round_timeout": 0.3, **of_flower(more)}, {"clients_per_round": 3, "seed": 5, **more}
    common = fl.FederatedStrategy(algorithm(), client=None if client is None else client(), **more)
    made = client_app(tmp_path, common, module, options, trainer)
    nodes = {100 + k: made for k in range(clients)} | {100 + k: app for k, app in (apps or {}).items()}
    grid = InProcess(nodes, {100 + k: {"client-id": k} for k in range(clients)}, lose)
    precision = (trainer or {}).get("precision", "32-true")
    server = fl.FederatedServer(fresh(module, **(options or {})), common, clients, precision)
    strategy = FairStrategy(server, checkpoint=tmp_path / "run", join_timeout=0.5, **own)
    if rounds:
        strategy.start(grid, rounds)
    return strategy, grid
