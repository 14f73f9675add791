# SPDX-License-Identifier: Apache-2.0
"""FederatedServer: the server of a real federation, round by round, whatever carries its messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor

from fl_lightning.arguments import DEVICE, Bounds, Example, altered, check, checked
from fl_lightning.clients.update_rows import UpdateRows
from fl_lightning.core.records import RoundRecord
from fl_lightning.data.cohort_samplers import Selection, cohort_size
from fl_lightning.federation.closing import Closing, losses_of
from fl_lightning.federation.message_checks import printable
from fl_lightning.federation.messages import ClientMessage, ServerMessage
from fl_lightning.federation.registered_clients import RegisteredClients
from fl_lightning.federation.served_model import ServedModel
from fl_lightning.fit.server import Server
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.fit.uploads import Round
from fl_lightning.lightning.fit_description import check_resume
from fl_lightning.lightning.names import LightningModule

VERSION = 1
"""Of what :meth:`FederatedServer.state_dict` returns."""


class FederatedServer(RegisteredClients):
    """The server of a federation whose clients are :class:`fl_lightning.FederatedClient` objects somewhere else.

    It makes messages and takes answers; the transport is somebody else's. With the same strategy, initial weights and
    data, the global model has the bits of ``trainer.fit``, in whatever order answers arrive. One round::

        for client in server.open_round():
            answers[client] = send(server.message(client))     # FederatedClient.train, elsewhere
        record = server.close_round(answers, missing={3: "no answer within 60 s"})

    Args:
        module: holds the initial weights, and its ``configure_optimizers`` says which of them are trained; that runs
            here without data. Its parameters belong to the server until :meth:`finish`.
        strategy: says what is computed. The server takes a copy of its rules. A client without a usable answer is left
            out of its round whatever ``on_client_error`` says.
        num_clients: registered clients; their ids go from 0 on.
        precision: what numbers parameters and updates are: the ``precision`` of the clients' trainers, if that ends in
            ``-true``. With mixed precision they are of 32 bits.
        device: where the server computes.
        rounds: of the whole federation; ``None``: nobody knows.

    Attributes:
        options: the strategy's arguments.
        cohort_size: the largest number of clients in a round.
        rounds: as given; it may be set before the first round.
        round: index of the next round, or of the one that is open.
        fit_description: the federation in plain values, to be compared with clients and checkpoints.
        counted: by client, the last round in which its answer entered the step.
        last_round: what the last round did.
        learning_rate: mean learning rate of the clients in that round; ``None`` without one.
        memory: bytes that the server holds beside the module, by name; empty before the first round.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, ``strategy`` has a ``partition`` or a client rule that does not say
            where its state lives, or ``configure_optimizers`` needs data.
    """

    @checked(module=Example("fl.ClientModule(net)"), num_clients=Bounds(1), device=DEVICE, rounds=Bounds(1))
    def __init__(
        self,
        module: LightningModule,
        strategy: FederatedStrategy,
        num_clients: int,
        precision: Literal["32-true", "64-true", "bf16-true", "16-true"] = "32-true",
        device: str = "cpu",
        rounds: int | None = None,
    ) -> None:
        super().__init__()
        options = self.options = strategy.options.for_federation()
        self.cohort_size = cohort_size(options.clients_per_round, num_clients)
        self.algorithm, self.client_rule = options.algorithm, options.client_rule
        model = self._model = ServedModel(module, options, precision, device)
        self.module, self._frozen = model.module, model.frozen
        self._rows = UpdateRows(model.binding, self.cohort_size)
        self._server = Server(options, model.binding, model.buffers, self._rows, num_clients)
        self.fit_description = self._server.description()
        self.rounds, self.num_clients = rounds, num_clients
        self.round = 0
        self.last_round: RoundRecord | None = None
        self.memory: Mapping[str, int] = {}
        self._steps_per_round: int | None = None
        self._began = 0.0
        self._selection: Selection | None = None
        self._server.reset()

    def begin(self) -> None:
        """Before the first round of this object; after :meth:`load_state_dict` if it goes on from a checkpoint."""
        if self._steps_per_round is None:
            self._steps_per_round = self._mean_steps()
        sizes = self.client_sizes if self._changed else None
        self.memory = self._server.begin(self.rounds, keeps_client_optimizers=False, changed=sizes)
        self._ready = True

    def open_round(self) -> tuple[int, ...]:
        """Draws the clients of the round; they are to be sent :meth:`message`.

        Raises:
            ValueError: all ``rounds`` are closed.
        """
        if self.rounds is not None and self.round >= self.rounds:
            raise ValueError(f"rounds must be more than the {self.round} that are closed, found {self.rounds}")
        if not self._ready:
            self.begin()
        self._began, self._server.failures.names = time.perf_counter(), self.client_names
        selection = self._selection = self.options.drawn(self.round, self.cohort_size, self.client_sizes)
        self._model.plain = self._model.server_module.plain()
        return tuple(client for client in map(int, selection.client_ids) if client not in selection.drop_outs)

    def message(self, client_id: int) -> ServerMessage:
        """What a client needs to train in the round that is open; tensors are the server's own."""
        return self._told(client_id, self._model.params, self._steps_per_round, self.rounds)

    def evaluation_message(self, client_id: int) -> ServerMessage:
        """What a client needs to evaluate the model after the rounds so far, with what the method wants evaluated."""
        return self._told(client_id, self.evaluated_params)

    def _told(self, client: int, params: Tensor, steps: int | None = None, rounds: int | None = None) -> ServerMessage:
        message = ServerMessage(
            self.round, params, counted=self.counted.get(client), buffers=self._model.buffers.global_values(),
            steps_per_round=steps, module=self._model.plain, rounds=rounds,
            loss_batch_factor=self._server.loss_batch_factor,
        )  # fmt: skip
        return message.to_client(client, self.client_rule)

    @property
    def evaluated_params(self) -> Tensor:
        """``[n]`` the parameters that the method wants evaluated; those in training themselves, if it is these."""
        return self._model.evaluated

    def close_round(
        self,
        answers: Mapping[int, ClientMessage | Mapping[str, Any]],
        missing: Mapping[int, str] | None = None,
        losses_at: Callable[[Tensor, Sequence[int]], Mapping[int, Any]] | None = None,
        silent: Iterable[int] = (),
    ) -> RoundRecord:
        """Aggregates the answers and applies the step, or leaves everything as it is.

        An answer that is none, or that the method cannot work with, leaves its client out of the round, with the reason
        in the record. Nothing that a client sends raises.

        Args:
            answers: what came, by the client that it came from: a message, or its fields.
            missing: why other clients of the round have no usable answer.
            losses_at: asks clients for their losses at given parameters, for methods that ask again; by client, the
                loss, or a sentence about why there is none.
            silent: those of ``missing`` from which nothing came at all.

        Raises:
            ClientError: too many rounds in a row have failed.
            TypeError: ``answers`` or ``missing`` is no mapping.
            ValueError: no round is open, or an answer is of a client that has none.
        """
        if self._selection is None:
            raise ValueError("close_round needs a round that open_round has opened, found none")
        check("answers of close_round", answers, Mapping[Any, Any])
        check("missing of close_round", missing, Mapping[Any, Any] | None)
        cohort = tuple(map(int, self._selection.client_ids))
        for name, of in (("answers", answers), ("missing", missing or {})):
            others = sorted(of.keys() - set(cohort))
            if others:
                raise ValueError(f"{name} must be of clients of the round, {cohort}, found {others}")
        trained, model = time.perf_counter() - self._began, self._model
        why = {client: printable(words) for client, words in (missing or {}).items()}
        current = Round(
            self.round, dropped=dict.fromkeys(self._selection.drop_outs, "dropped out"), began=self._began,
            asks=None if losses_at is None else partial(losses_of, losses_at),
        )  # fmt: skip
        closing = Closing(self._server, model, self.options.needs, self._rows, cohort, self._num_samples)
        record, accepted = closing.closed(current, answers, why, silent)
        model.merge(current.uploads, record.client_ids)
        self._counts([accepted[client] for client in record.client_ids], self.round)
        self._selection = None
        self.round += 1
        self.last_round = altered(record, local_steps=self._local_steps, training_seconds=trained)
        return self.last_round

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bit-exact continuation needs, between two rounds: tensors, numbers and strings alone.

        ``"state_dict"`` is that of the module with the parameters to evaluate, as in a Lightning checkpoint.
        """
        return {
            "version": VERSION,
            "fit": self.fit_description.state_dict(),
            "round": self.round,
            **self._model.state_dict(),
            **self._server.states(),
            "steps_per_round": self._steps_per_round,
            **self._clients_state(),
        }

    @checked()
    def load_state_dict(self, state: Mapping[str, Any], source: str = "the state") -> None:
        """Goes on from what :meth:`state_dict` returned, before the first round.

        Args:
            state: the state.
            source: what it comes from, for errors.

        Raises:
            ValueError: it is of another federation (method, layout, server optimizer), or was written by a version that
                stores other things.
        """
        if state.get("version") != VERSION:
            raise ValueError(
                f"{source} has version {state.get('version')}, and this fl_lightning reads version {VERSION}: use the "
                "fl_lightning that wrote it"
            )
        known = {**state, "client_optimizers": {}}
        self._changed = check_resume(known, self.fit_description, source, self.options.strict_resume)
        self._model.load_state_dict(state)
        self._server.load(state, {})
        self.round, self._steps_per_round = state["round"], state["steps_per_round"]
        self._load_clients(state)

    def module_state_dict(self) -> dict[str, Tensor]:
        """The module's state with the parameters to evaluate, copied to the CPU."""
        return self._model.module_state_dict()

    def finish(self) -> str | None:
        """All rounds are over: the module keeps the parameters to evaluate. Returns what the method has to say."""
        words = self.algorithm.end_fit()
        self._model.release()
        return words
