# SPDX-License-Identifier: Apache-2.0
"""The client's side: a Flower ClientApp around :class:`fl_lightning.FederatedClient`."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fl_lightning.arguments import ANY, FILLED, checked
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.federation.federated_client import FederatedClient
from fl_lightning.federation.flower.messages import (
    FAILED,
    HELLO,
    LOSS,
    Answer,
    Loss,
    Order,
    Origin,
    packed,
    taken,
    unpacked,
)
from fl_lightning.federation.message_checks import printable
from fl_lightning.federation.messages import ServerMessage
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.lightning.names import LightningModule, rank_zero_info
from fl_lightning.report.number_formats import plural

ID_KEYS = ("client-id", "partition-id")
"""Entries of a node's configuration that say which client it is; the second one is that of Flower's simulation."""


@checked(model=ANY, data=ANY, trainer=FILLED)
def lightning_client_app(
    model: Callable[..., LightningModule],
    data: Callable[..., Any],
    strategy: FederatedStrategy,
    trainer: Mapping[str, Any] | None = None,
    state_dir: str | Path = "~/.fl_lightning/flower",
) -> ClientApp:
    """Makes a Flower ClientApp that trains and evaluates an unchanged LightningModule for :class:`FairStrategy`.

    A node says which client it is by ``client-id`` in its configuration (``flower-supernode --node-config
    'client-id=2'``), from 0. In Flower's simulation, ``partition-id`` says it.

    Args:
        model: makes the LightningModule: its class, or a function. It is called without arguments, or with Flower's
            ``Context`` if it takes one.
        data: likewise makes the client's own LightningDataModule, DataLoader or dataset, or a
            :class:`fl_lightning.FederatedDataModule` with the data of all, of which the node takes its client's.
        strategy: what the server has (:class:`FairStrategy`).
        trainer: further arguments of the Trainer, such as ``accelerator`` and ``precision``.
        state_dir: where personal models, last local models and kept optimizers lie, in a folder per federation. It must
            outlive the node's processes: Flower starts one for every message.

    Raises:
        TypeError: an argument has the wrong type.
    """

    def made(context: Context, origin: Origin) -> FederatedClient:
        client_id = client_id_of(context)
        held = _called(data, context)
        shared = hasattr(held, "num_clients") and hasattr(held, "client_sizes")
        return FederatedClient(
            _called(model, context), held, strategy, client_id, None if shared else origin.num_clients, trainer,
            Path(state_dir).expanduser() / origin.federation,
        )  # fmt: skip

    app = ClientApp()

    def answering(work: Callable[[dict[str, Any], Callable[[], FederatedClient]], Any]) -> Callable[..., Message]:
        def answer(message: Message, context: Context) -> Message:
            try:
                values = unpacked(message.content)
                origin = taken(Origin, values)
                return Message(work(values, lambda: made(context, origin)), reply_to=message)
            except Exception as error:  # the server names it and goes on without this client
                words = printable(f"{type(error).__name__}: {error}")
                rank_zero_info(f"this client cannot answer: {words}")
                return Message(Error(FAILED, words), reply_to=message)

        return answer

    def hello(values: dict[str, Any], client: Callable[[], FederatedClient]) -> Any:
        found = client().introduction()
        rank_zero_info(f"client {found.client_id} has introduced itself, and waits for the server")
        return packed(found)

    def train(values: dict[str, Any], client: Callable[[], FederatedClient]) -> Any:
        order, message = taken(Order, values), taken(ServerMessage, values)
        began, found, sent = time.perf_counter(), list[EvaluationRecord | None](), None
        for stage in order.stages:
            chosen = message if order.evaluated is None else replace(message, params=order.evaluated)
            found.append(client().evaluate(chosen, stage))  # with a module of its own, so that it leaves no trace
        if order.trains:
            sent = client().train(message)
        seen = [record for record in found if record is not None]
        when = f"after {plural(message.round, 'round')}" if sent is None else f"round {message.round}"
        done = [_shown(record) for record in seen]
        if sent is not None:
            done.append(f"client {sent.client_id} trained on {sent.size} samples for {sent.steps} steps")
        took = time.perf_counter() - began
        rank_zero_info(f"{when}: {'; '.join(done) or 'there is nothing to evaluate'} ({took:.1f} s)")
        return packed(Answer.of(sent, seen))

    def loss(values: dict[str, Any], client: Callable[[], FederatedClient]) -> Any:
        return packed(Loss(client().loss(taken(ServerMessage, values))))

    app.query(HELLO)(answering(hello))
    app.query(LOSS)(answering(loss))
    app.train()(answering(train))
    return app


def client_id_of(context: Context) -> int:
    """Which client a node is, by its configuration.

    Raises:
        ValueError: it does not say.
    """
    for name in ID_KEYS:
        value = context.node_config.get(name)
        if value is not None:
            if isinstance(value, bool) or not str(value).isdecimal():
                raise ValueError(f"{name} of the node's configuration must be an integer from 0 on, found {value!r}")
            return int(value)
    raise ValueError(
        f"the node's configuration must say which client it is, found {dict(context.node_config)}: start it with "
        "flower-supernode --node-config 'client-id=0'"
    )


def _called(maker: Callable[..., Any], context: Context) -> Any:
    wants = "context" in inspect.signature(maker).parameters
    return maker(context=context) if wants else maker()


def _shown(record: EvaluationRecord) -> str:
    values = ", ".join(f"{name} {float(value[0]):.4g}" for name, value in record.values.items())
    kind = "validation" if record.stage == "val" else "test"
    return f"{kind} of client {record.client_ids[0]} on {int(record.sizes[0])} samples: {values}"
