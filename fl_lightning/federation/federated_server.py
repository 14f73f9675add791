# SPDX-License-Identifier: Apache-2.0
"""FederatedServer: the server of a real federation, round by round, whatever carries its messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.algorithms import FedAvg
from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.base import obstacle as rule_obstacle
from fl_lightning.algorithms.guards.base import Guard
from fl_lightning.algorithms.records import Federation, Needs, mean_rate
from fl_lightning.arguments import DEVICE, Bounds, Example, checked
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.clients.sequential import Sequential
from fl_lightning.clients.trained import trained_names
from fl_lightning.clients.update_rows import UpdateRows
from fl_lightning.core.modules import frozen_digest
from fl_lightning.core.records import RoundRecord
from fl_lightning.core.seeding import derive_seed
from fl_lightning.core.storage import kept
from fl_lightning.data.cohort_samplers import CohortSampler, UniformSampler, cohort_size
from fl_lightning.federation.client_messages import Fitting, losses_of
from fl_lightning.federation.closing import Closing
from fl_lightning.federation.door import said
from fl_lightning.federation.messages import ClientIntroduction, ClientMessage, ServerMessage
from fl_lightning.federation.module_state import HomeModule
from fl_lightning.federation.registered_clients import Introductions
from fl_lightning.fit.checks import check_selection
from fl_lightning.fit.guarding import Guards
from fl_lightning.fit.options import FitOptions
from fl_lightning.fit.resume_checks import check_resume, remembers
from fl_lightning.fit.server import Server
from fl_lightning.fit.uploads import Round
from fl_lightning.lightning.fit_description import FitDescription
from fl_lightning.lightning.names import LightningModule
from fl_lightning.lightning.optimizers import configured_optimizers

VERSION = 1
"""Of what :meth:`FederatedServer.state_dict` returns."""

_DTYPES = {"32-true": None, "64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class FederatedServer:
    """The server of a federation whose clients are :class:`fl_lightning.FederatedClient` objects somewhere else.

    It makes messages and takes answers; the transport is somebody else's. With the arguments of
    :class:`fl_lightning.FederatedStrategy`, the same initial weights, data and seed, the global model has the bits of
    ``trainer.fit``, in whatever order answers arrive. One round::

        for client in server.open_round():
            answers[client] = send(server.message(client))     # FederatedClient.train, elsewhere
        record = server.close_round(answers, missing={3: "no answer within 60 s"})

    Args:
        module: holds the initial weights, and its ``configure_optimizers`` says which of them are trained; that runs
            here without data. Its parameters belong to the server until :meth:`finish`.
        num_clients: registered clients; their ids go from 0 on.
        algorithm: the method; default FedAvg.
        client: the client half of another method, as in the strategy.
        clients_per_round: as in the strategy.
        local_epochs: as in the strategy; the clients are given the same.
        local_steps: as in the strategy; the clients are given the same.
        full_gradients: as in the strategy; the clients are given the same.
        server_optimizer: as in the strategy.
        sampler: as in the strategy; default uniform without replacement.
        client_optimizer_state: as in the strategy; the clients are given the same.
        buffers: as in the strategy; the clients are given the same.
        seed: as in the strategy; the clients are given the same.
        guard: as in the strategy.
        loss_batch_size: as in the strategy; the clients are given the same.
        min_clients: fewest usable answers of a round. A round with fewer changes nothing.
        max_failed_rounds: stop with an error after so many rounds in a row in which clients answered and no answer was
            usable, or the step was not finite. ``None`` never stops.
        strict_resume: as in the strategy.
        precision: what numbers parameters and updates are: the ``precision`` of the clients' trainers, if that ends in
            ``-true``. With mixed precision they are of 32 bits.
        device: where the server computes.
        rounds: of the whole federation; ``None``: nobody knows.

    Attributes:
        rounds: as given; it may be set before the first round.
        round: index of the next round, or of the one that is open.
        counted: by client, the last round in which its answer entered the step.
        last_round: what the last round did.
        learning_rate: mean learning rate of the clients in that round; ``None`` without one.
        memory: bytes that the server holds beside the module, by name; empty before the first round.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, the client rule does not say where its state lives, or
            ``configure_optimizers`` needs data.
    """

    @checked(
        module=Example("fl.ClientModule(net)"),
        algorithm=Example("fl.algorithms.FedLF()"),
        num_clients=Bounds(1),
        clients_per_round=Bounds(above=0),
        local_epochs=Bounds(1),
        local_steps=Bounds(1),
        server_optimizer=Example("functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9)"),
        sampler=Example("fl.data.UniformSampler()"),
        guard=Example("fl.guards.MultiKrum(dishonest=0.1)"),
        loss_batch_size=Bounds(1),
        min_clients=Bounds(1),
        device=DEVICE,
        max_failed_rounds=Bounds(1),
        rounds=Bounds(1),
    )
    def __init__(
        self,
        module: LightningModule,
        num_clients: int,
        algorithm: ServerRule | None = None,
        client: ClientRule | ServerRule | None = None,
        clients_per_round: int | float = 1.0,
        local_epochs: int = 1,
        local_steps: int | None = None,
        full_gradients: bool = False,
        server_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        sampler: CohortSampler | None = None,
        client_optimizer_state: Literal["reset", "keep"] = "reset",
        buffers: Literal["mean", "global", "largest"] = "mean",
        seed: int = 0,
        guard: Guard | list[Guard] | tuple[Guard, ...] | None = None,
        loss_batch_size: int | None = None,
        min_clients: int = 1,
        max_failed_rounds: int | None = 3,
        strict_resume: bool = True,
        precision: Literal["32-true", "64-true", "bf16-true", "16-true"] = "32-true",
        device: str = "cpu",
        rounds: int | None = None,
    ) -> None:
        algorithm = FedAvg() if algorithm is None else algorithm
        options = self._options = FitOptions(
            algorithm=algorithm, client=client,
            clients_per_round=clients_per_round, local_epochs=local_epochs, local_steps=local_steps,
            full_gradients=full_gradients, server_optimizer=server_optimizer,
            sampler=UniformSampler() if sampler is None else sampler, client_optimizer_state=client_optimizer_state,
            buffers=buffers, fairness_metric=None, fairness_mode="max", on_client_error="drop", attack=None, seed=seed,
            executor=Sequential(), loss_batch_size=loss_batch_size, min_clients=min_clients,
            strict_resume=strict_resume, max_failed_rounds=max_failed_rounds, planned_steps=False, guard=guard,
        )  # fmt: skip
        obstacle = rule_obstacle(options.client_rule)
        if obstacle is not None:
            raise ValueError(f"a server cannot work apart from its clients: {obstacle}")
        self._capacity = cohort_size(clients_per_round, num_clients)
        options.check_rounds(self._capacity)
        for each in options.guards:
            each.check(num_clients)
        module.configure_model()
        self.module = module.to(device=device, dtype=_DTYPES[precision])
        self.algorithm, self.client_rule = options.algorithm, options.client_rule
        trained = trained_names(self.module, configured_optimizers(self.module))
        self._binding = BoundParameters(self.module, algorithm.layers, trained)
        options.client_rule.check_module(self.module, self._binding.layout)
        self._bank = BufferBank(self.module, buffers, trained)
        self._home, self._plain = HomeModule(self.module, self._binding.theta.device), dict[str, Any]()
        self._rows = UpdateRows(self._binding, self._capacity)
        guards = Guards(options.guards)
        self._server = Server(options, self._binding, self._bank, self._rows, num_clients, guards)
        self.rounds, self.num_clients, self.min_clients = rounds, num_clients, min_clients
        self._introductions = Introductions(num_clients, self.fit_description, frozen_digest(self.module, trained))
        self.round, self.counted = 0, dict[int, int]()
        self.last_round: RoundRecord | None = None
        self.learning_rate: float | None = None
        self.memory: Mapping[str, int] = {}
        self._steps_per_round: int | None = None
        self._local_steps, self._began = 0, 0.0
        self._cohort: tuple[int, ...] | None = None
        self._drop_outs: frozenset[int] = frozenset()
        self._server.reset()
        self._ready = False

    @property
    def needs(self) -> Needs:
        """What both halves of the method ask for."""
        return self._options.needs

    @property
    def cohort_size(self) -> int:
        """The largest number of clients in a round."""
        return self._capacity

    @property
    def device(self) -> torch.device:
        """Where the server computes."""
        return self._binding.theta.device

    # ---- clients

    @property
    def fit_description(self) -> FitDescription:
        """The federation in plain values, to be compared with clients and checkpoints."""
        optimizer = self._server.optimizer
        return FitDescription.of(
            self.algorithm, self.client_rule, self._binding.layout,
            clients=self.num_clients,
            server_optimizer="none" if optimizer is None else type(optimizer).__name__,
            settings={"clients_per_round": self._capacity, **self._options.settings()},
        )  # fmt: skip

    def refusal(self, introduction: ClientIntroduction | Mapping[str, Any]) -> str | None:
        """Why this client cannot take part, in words: another layout, method, setting, version; ``None`` if it can.

        Args:
            introduction: what came from it: a message, or its fields.
        """
        return self._introductions.refusal(introduction)

    def register(self, introduction: ClientIntroduction | Mapping[str, Any]) -> None:
        """Takes a client into the federation, or what it says anew.

        Args:
            introduction: as in :meth:`refusal`.

        Raises:
            ValueError: :meth:`refusal`.
        """
        self._introductions.register(introduction)
        self._server.names = self.client_names

    @property
    def registered(self) -> frozenset[int]:
        """The clients that have introduced themselves."""
        return self._introductions.known

    @property
    def client_names(self) -> Sequence[str]:
        """What people call the clients; numbers, as long as they do not say."""
        return self._introductions.names

    @property
    def client_sizes(self) -> Tensor:
        """``[N]`` int64 training samples; 0 for clients that have not introduced themselves."""
        return self._introductions.sizes

    # ---- a round

    def begin(self) -> None:
        """Before the first round of this object; after :meth:`load_state_dict` if it goes on from a checkpoint."""
        if self._steps_per_round is None:
            self._steps_per_round = self._introductions.steps_per_round
        theta = self._binding.theta
        federation = Federation(
            self.num_clients, self._binding.layout, theta.device, theta.dtype, self._capacity, self.rounds,
            buffers=self._bank.nbytes,
        )  # fmt: skip
        self.memory = self._server.begin(federation, keeps_client_optimizers=False)
        self._ready = True

    def open_round(self) -> tuple[int, ...]:
        """Draws the clients of the round; they are to be sent :meth:`message`."""
        if not self._ready:
            self.begin()
        self._began = time.perf_counter()
        options, sizes = self._options, self.client_sizes
        selection = options.sampler.select(self.round, self._capacity, sizes, derive_seed(options.seed, "sampler"))
        check_selection(selection.client_ids, self._capacity, self.num_clients, type(options.sampler).__name__)
        self._plain = self._home.plain()
        self._cohort, self._drop_outs = tuple(map(int, selection.client_ids)), frozenset(selection.drop_outs)
        return tuple(client for client in self._cohort if client not in self._drop_outs)

    def message(self, client_id: int) -> ServerMessage:
        """What a client needs to train in the round that is open; tensors are the server's own."""
        assert self.rounds is None or self.round < self.rounds
        return ServerMessage.to_client(
            client_id, self.client_rule, self.round, self._binding.theta, self.counted.get(client_id),
            self._bank.global_values(), self._steps_per_round, self.rounds, self._plain,
        )  # fmt: skip

    def evaluation_message(self, client_id: int) -> ServerMessage:
        """What a client needs to evaluate the model after the rounds so far, with what the method wants evaluated."""
        return ServerMessage(
            self.round, self.evaluated_params, kept.state(self.client_rule, "all"),
            kept.for_one(self.client_rule, client_id),
            self.counted.get(client_id), self._bank.global_values(), module=self._plain,
        )  # fmt: skip

    @property
    def evaluated_params(self) -> Tensor:
        """``[n]`` the parameters that the method wants evaluated; those in training themselves, if it is these."""
        theta = self._binding.theta
        return self.algorithm.evaluation_params(theta)

    @property
    def evaluates_params(self) -> bool:
        """Whether they are the parameters in training."""
        return self.evaluated_params is self._binding.theta

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
            ValueError: no round is open, or an answer is of a client that has none.
        """
        if self._cohort is None:
            raise ValueError("close_round needs a round that open_round has opened, found none")
        others = sorted(answers.keys() - set(self._cohort))
        if others:
            raise ValueError(f"answers must be of clients of the round, {self._cohort}, found {others}")
        trained = time.perf_counter() - self._began
        form = Fitting(self.round, self._binding.theta, self._bank, self.needs, self._home)
        given, misfits = form.sorted_out({k: answers[k] for k in self._cohort if k in answers})
        why = {client: said(words) for client, words in (missing or {}).items()} | misfits
        came = len(answers.keys() | why.keys() - set(silent))
        current = Round(
            self.round, trained=came, dropped=dict.fromkeys(self._drop_outs, "dropped out"), began=self._began,
            asks=None if losses_at is None else partial(losses_of, losses_at),
        )  # fmt: skip
        for client in self._cohort:
            if client not in self._drop_outs and client not in given:
                self._server.drop(current, client, why.get(client, "no answer"))
        closing = Closing(self._server, form, self._rows, self._cohort, given, self._introductions.num_samples)
        record = closing.closed(current)
        self._home.merge(current.uploads, record.client_ids)
        self._plain = self._home.plain()
        counted = {client: given[client] for client in record.client_ids}
        self.counted |= dict.fromkeys(counted, self.round)
        self._introductions.resize({client: answer.size for client, answer in counted.items()})
        self._local_steps += sum(answer.steps for answer in counted.values())
        known = [answer.client_lr for answer in counted.values() if answer.client_lr is not None]
        self.learning_rate = mean_rate(known) if known else None
        self._cohort = None
        self.round += 1
        self.last_round = replace(record, local_steps=self._local_steps, training_seconds=trained)
        return self.last_round

    # ---- the end

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bit-exact continuation needs, between two rounds: tensors, numbers and strings alone.

        ``"state_dict"`` is that of the module with the parameters to evaluate, as in a Lightning checkpoint.
        """
        return {
            "version": VERSION,
            "fit": self.fit_description.state_dict(),
            "round": self.round,
            "state_dict": self.module_state_dict(),
            "params": self._binding.theta.clone(),
            "buffers": {name: value.clone() for name, value in self._bank.global_values().items()},
            "module": self._home.plain(metrics=True),
            **self._server.states(self._rows.columns),
            "counted": dict(self.counted),
            "steps_per_round": self._steps_per_round,
            "local_steps": self._local_steps,
            "clients": self._introductions.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], source: str = "the state") -> None:
        """Goes on from what :meth:`state_dict` returned, before the first round.

        Args:
            state: the state.
            source: what it comes from, for errors.

        Raises:
            ValueError: it is of another federation (method, layout, number of clients, server optimizer), or was
                written by a version that stores other things.
        """
        if state.get("version") != VERSION:
            raise ValueError(
                f"{source} has version {state.get('version')}, and this fl_lightning reads version {VERSION}: use the "
                "fl_lightning that wrote it"
            )
        found = FitDescription.from_state_dict(state["fit"])
        memories = remembers({**state, "client_optimizers": {}})
        check_resume(found, self.fit_description, source, memories, self._options.strict_resume)
        self.module.load_state_dict(state["state_dict"])
        self._binding.theta.copy_(state["params"])
        self._binding.bind_global()
        self._bank.put(state["buffers"])
        self._bank.remember()
        self._home.load(state["module"])
        self._plain = self._home.plain()
        self._server.load(state, self._rows.columns)
        self.round, self.counted = state["round"], dict(state["counted"])
        self._steps_per_round = state["steps_per_round"]
        self._local_steps = state["local_steps"]
        self._introductions.load_state_dict(state["clients"])
        self._server.names = self.client_names

    def module_state_dict(self) -> dict[str, Tensor]:
        """The module's state with the parameters to evaluate, copied to the CPU."""
        with self._binding.showing(self.evaluated_params.contiguous()):
            return {name: value.detach().cpu().clone() for name, value in self.module.state_dict().items()}

    def finish(self) -> str | None:
        """All rounds are over: the module keeps the parameters to evaluate. Returns what the method has to say."""
        words, final = self.algorithm.end_fit(), self.evaluated_params
        if final is not self._binding.theta:
            self._binding.theta.copy_(final)
        self._binding.release()
        return words
