# SPDX-License-Identifier: Apache-2.0
"""The server's side: a strategy for Flower's ServerApp that runs any server rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, TypeVar

from flwr.app import MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fl_lightning.algorithms.records import READS
from fl_lightning.arguments import ANY, Bounds, altered, checked
from fl_lightning.core.records import EvaluationRecord, RoundRecord, client_label
from fl_lightning.federation.federated_server import FederatedServer
from fl_lightning.federation.flower.messages import LOSS, Answer, Loss, Order, Origin, packed, taken, unpacked
from fl_lightning.federation.flower.nodes import Mailbox, Members
from fl_lightning.federation.message_checks import MessageError, printable
from fl_lightning.federation.server_run import ServerRun
from fl_lightning.lightning.names import Callback, LightningModule, Logger, rank_zero_info, rank_zero_warn
from fl_lightning.report.number_formats import plural

_M = TypeVar("_M")
_Stage = Literal["val", "test"]
_Order = Callable[[], RecordDict]


class FairStrategy:
    """Runs a federation over Flower's Message API with any method of this package.

    Every client of a round gets one message: it evaluates the global model, measures what the method asks for, and
    trains. With the same data and seed, the global model has the bits of ``Trainer(FederatedStrategy(...)).fit``. After
    every round a checkpoint is written. A run that finds one goes on from it, bit for bit.

    Args:
        server: the server, which says what is computed; it is not told ``rounds``.
        checkpoint: folder of ``last.ckpt``.
        round_timeout: seconds that clients of a round have; ``None``: as long as it takes. Later replies do not count.
        join_timeout: seconds to wait at the beginning for all clients, and before a round as long as fewer than
            ``min_clients`` of those that it needs are connected.
        evaluation: whose data the global model is evaluated on after a round: that of ``"all"`` connected clients, of
            those that train next (``"cohort"``), or of nobody (``"none"``).
        evaluate_every: rounds from one evaluation to the next; the last round is always followed by one.
        test: evaluate the test data, too, after the last round.
        logger: one of Lightning's loggers, or several.
        callbacks: those of :mod:`fl_lightning.callbacks` that read records.
        bind_keys: a client id belongs to the public key of the node that came with it first. Needs nodes that are
            registered and authenticated; without, any node may say that it is any client.

    Attributes:
        server: the server.
        records: the rounds that this object has run.
        last_evaluation: the last evaluation.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Example::

        app = ServerApp()

        @app.main()
        def main(grid, context):
            strategy = fl.FederatedStrategy(fl.algorithms.FedLF(), clients_per_round=3)
            server = fl.FederatedServer(Model(), strategy, num_clients=4)
            FairStrategy(server).start(grid, num_rounds=200)
    """

    @checked(round_timeout=Bounds(above=0), join_timeout=Bounds(0), evaluate_every=Bounds(1), logger=ANY)
    def __init__(
        self,
        server: FederatedServer,
        checkpoint: str | Path = "run",
        round_timeout: float | None = 600.0,
        join_timeout: float = 120.0,
        evaluation: Literal["all", "cohort", "none"] = "all",
        evaluate_every: int = 1,
        test: bool = False,
        logger: Logger | Sequence[Logger] | None = None,
        callbacks: Sequence[Callback] = (),
        bind_keys: bool = False,
    ) -> None:
        self.server = server
        self.records: list[RoundRecord] = []
        self.last_evaluation: EvaluationRecord | None = None
        self._folder, self._timeout, self._join = Path(checkpoint), round_timeout, join_timeout
        self._evaluation, self._every, self._test, self._bind = evaluation, evaluate_every, test, bind_keys
        self._loggers = [] if logger is None else [logger] if isinstance(logger, Logger) else list(logger)
        self._callbacks = callbacks
        if server.options.needs.requery:
            rank_zero_warn(
                f"{server.options.called} asks clients for losses in the middle of a round, at several points one "
                "after the other. Over a network each point costs a message to every client of the round, and Flower "
                "starts a process for each"
            )

    @property
    def model(self) -> LightningModule:
        """The module; after :meth:`start`, with the parameters that the method wants evaluated."""
        return self.server.module

    @property
    def privacy(self) -> str:
        """What the server sees of clients, and what the method needs of it (:data:`Reads`)."""
        return (
            "This server sees every client's update, number of samples, losses and metrics. "
            f"{self.server.fit_description.called} needs {READS[self.server.options.reads]}"
        )

    @checked(grid=ANY, num_rounds=Bounds(1))
    def start(self, grid: Grid, num_rounds: int) -> LightningModule:
        """Runs the federation to its end, or goes on from the checkpoint in the folder.

        Returns:
            The module with the parameters that the method wants evaluated.

        Raises:
            ClientError: too many rounds in a row have failed.
            TimeoutError: too few clients have come.
            ValueError: the checkpoint is damaged or of another federation; or this object has started before.
        """
        server = self.server
        if server.rounds is not None:
            raise ValueError("start can be called once: make another server, which goes on from the checkpoint")
        server.rounds = num_rounds
        run = self._run = ServerRun(server, self._folder, self._loggers, self._callbacks)
        extra = run.resume() or {"federation": token_hex(8), "keys": {}}
        self._besides = vars(Origin(server.num_clients, extra["federation"]))
        keys = dict(extra["keys"]) if self._bind else None
        self._members = Members(grid, server, self._besides, self._join, keys)
        self._mailbox = Mailbox(grid)
        self._members.gather(server.options.min_clients, self._join)
        rank_zero_info(self.privacy)
        with run.running():
            while server.round < num_rounds:
                self._round()
                run.save({"federation": extra["federation"], "keys": keys or {}})
            self._evaluate_at_the_end()
        return server.module

    # ---- a round

    def _round(self) -> None:
        server, index = self.server, self.server.round
        due = index > 0 and index % self._every == 0 and self._evaluation != "none"
        stages: list[_Stage] = ["val"] if due else []
        cohort = server.open_round()
        nodes = self._members.connected(cohort, server.options.min_clients, self._join)
        orders = {client: partial(self._order, client, stages, trains=True) for client in nodes}
        if stages and self._evaluation == "all":
            others = self._members.nodes.keys() - set(cohort)
            orders |= {client: partial(self._order, client, stages, trains=False) for client in sorted(others)}
        rank_zero_info(f"round {index} ({index + 1} of {server.rounds}): {len(nodes)} of {len(cohort)} clients train")
        answers, missing, silent = self._exchanged(orders, MessageType.TRAIN, Answer)
        silent |= {client for client in cohort if client not in nodes}
        missing |= {client: "it is not connected" for client in cohort if client not in nodes}
        if stages:
            self._take_evaluations(answers, missing, "val", index)
        trained = {client: answer.trained or {} for client, answer in answers.items() if client in nodes}
        asks = self._losses_at if server.options.needs.requery else None
        record = server.close_round(trained, {k: why for k, why in missing.items() if k in cohort}, asks, silent)
        self.records.append(record)
        self._run.closed(record)

    def _order(self, client: int, stages: Sequence[_Stage], trains: bool) -> RecordDict:
        server = self.server
        message = server.message(client) if trains else server.evaluation_message(client)
        others = trains and stages and server.evaluated_params is not message.params
        evaluated = server.evaluated_params if others else None
        return packed(message, **vars(Order(trains, tuple(stages), evaluated)), **self._besides)

    def _exchanged(
        self, orders: Mapping[int, _Order], kind: str, form: type[_M]
    ) -> tuple[dict[int, _M], dict[int, str], set[int]]:
        """Answers by client and by ascending id, why others have none, and who said nothing at all."""
        clients = {self._members.nodes[client]: client for client in sorted(orders)}
        contents = {node: orders[client] for node, client in clients.items()}
        replies = self._mailbox.send(contents, kind, str(self.server.round), self._timeout)
        replies |= self._mailbox.collect(self._timeout)
        answers: dict[int, _M] = {}
        missing: dict[int, str] = {}
        silent = {client for node, client in clients.items() if replies[node].silent}
        for node, client in clients.items():
            reply = replies.pop(node)  # a model may be large, so one is held twice at a time
            if reply.content is None:
                missing[client] = reply.failure
                continue
            try:
                answers[client] = taken(form, unpacked(reply.content))
            except MessageError as flaw:
                missing[client] = str(flaw)
        return answers, missing, silent

    def _losses_at(self, params: Tensor, clients: Sequence[int]) -> dict[int, Any]:
        orders: dict[int, _Order] = {
            client: partial(packed, altered(self.server.message(client), params=params), **self._besides)
            for client in clients
            if client in self._members.nodes
        }
        answers, missing, _ = self._exchanged(orders, f"{MessageType.QUERY}.{LOSS}", Loss)
        absent = dict.fromkeys(clients, "it is not connected")
        return {**absent, **missing, **{client: answer.loss for client, answer in answers.items()}}

    # ---- evaluation

    def _take_evaluations(
        self, answers: Mapping[int, Answer], missing: Mapping[int, str], stage: _Stage, index: int
    ) -> None:
        found: list[EvaluationRecord] = []
        lost = {client: why for client, why in missing.items() if client in self._members.nodes}
        for client, answer in answers.items():
            try:
                record = answer.evaluation(client, index, stage)
            except MessageError as flaw:
                lost[client] = str(flaw)
                continue
            if record is not None:
                found.append(record)
        if lost:
            names = self.server.client_names
            words = "; ".join(f"client {client_label(client, names)}: {printable(why)}" for client, why in lost.items())
            rank_zero_warn(f"the evaluation after {plural(index, 'round')} lacks clients: {words}")
        record = self._run.evaluated(found, stage, index)
        self.last_evaluation = self.last_evaluation if record is None else record

    def _evaluate_at_the_end(self) -> None:
        stages: list[_Stage] = [] if self._evaluation == "none" else ["val"]
        stages += ["test"] if self._test else []
        if not stages:
            return
        self._members.connected(range(self.server.num_clients), 1, self._join)
        orders = {client: partial(self._order, client, stages, trains=False) for client in sorted(self._members.nodes)}
        answers, missing, _ = self._exchanged(orders, MessageType.TRAIN, Answer)
        for stage in stages:
            self._take_evaluations(answers, missing, stage, self.server.round)
