# SPDX-License-Identifier: Apache-2.0
"""One ``trainer.fit`` that is one client's visit: the clients' side of a round, and no server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from fl_lightning.algorithms.records import Federation
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.client_hooks import ClientHooks
from fl_lightning.clients.sequential import Sequential
from fl_lightning.clients.trained import trained_names
from fl_lightning.clients.upload import Upload
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.federation.messages import ClientMessage, ServerMessage, federation_plan, give
from fl_lightning.fit.client_options import ClientOptions
from fl_lightning.fit.client_side import ClientSide
from fl_lightning.fit.round_length import (
    check_visit_schedulers,
    refuse_steps_by_hand,
    visit_plan,
)
from fl_lightning.fit.round_loader import RoundLoader
from fl_lightning.lightning.epoch_loop import ClientTask, FederatedEpochLoop, install
from fl_lightning.lightning.names import Trainer


class VisitFit:
    """Conducts one round for the epoch loop: with one client that trains, or with nobody and one client to measure.

    Args:
        options: how clients train.
        client_id: the client.
        num_clients: registered clients; ``None``: those that the data have.
        message: what the server sent.
        kept: what :attr:`kept` was after the client's last visit that counted; ``None`` without one.
        trains: the client trains; otherwise its loss is measured.

    Attributes:
        sent: what the client sends.
        kept: what it keeps if the round counts.
        loss: what was measured.
    """

    def __init__(
        self,
        options: ClientOptions,
        client_id: int,
        num_clients: int | None,
        message: ServerMessage,
        kept: Mapping[str, Any] | None,
        trains: bool = True,
    ) -> None:
        self._options, self._message, self._before, self._trains = options, message, kept, trains
        self._client_id, self._num_clients = client_id, num_clients
        self._side: ClientSide | None = None
        self._binding: BoundParameters | None = None
        self._upload: Upload | None = None
        self.sent: ClientMessage | None = None
        self.kept: dict[str, Any] = {}
        self.loss = float("nan")
        self._knows_clock = True

    # ---- the trainer's fit

    def install(self, trainer: Trainer) -> None:
        """Puts the epoch loop, which asks this object for its round, into the trainer."""
        self._trainer = trainer
        self._loop: FederatedEpochLoop = install(trainer, self)
        self._loop.progress.begin_at(self._message.round)

    def bind(self) -> None:
        """The module is on its device."""
        module = self._trainer.lightning_module
        trained = trained_names(module, self._trainer.optimizers)
        self._binding = BoundParameters(module, self._options.algorithm.layers, trained)
        self._loop.forget_data()

    @property
    def hooks(self) -> ClientHooks:
        """What the client rule does inside local steps."""
        return self.side.runner.hooks

    @property
    def side(self) -> ClientSide:
        """The clients' side of the fit."""
        assert self._side is not None
        return self._side

    def training_loader(self, loaders: object, limit: int | float) -> RoundLoader:
        """Takes the client's data, and everything that the server and the client's last visit have left."""
        assert isinstance(loaders, ClientLoaders)
        if self._num_clients is not None:  # these are the client's own data
            loaders = loaders.numbered_from(self._client_id)
        self._plan_visits(loaders, limit)
        if self._binding is None:  # configure_optimizers asks for the number of steps
            return RoundLoader(1, loaders, self.open_round)
        binding = self._binding = self._binding.renewed(self._options.algorithm.layers, self._trainer.optimizers)
        self._side = ClientSide(self._trainer, self._loop, self._options, limit, binding, loaders, 1, Sequential())
        self._take_message(binding)
        self._take_rule_state(binding)
        return RoundLoader(1, loaders, self.open_round)

    def _plan_visits(self, loaders: ClientLoaders, limit: int | float) -> None:
        own = visit_plan(self._trainer, self._options, limit, loaders)
        full, has_all = self._options.needs.full_gradients, self._num_clients is None
        plan = federation_plan(self._message, own, has_all, self._options.local_epochs, full)
        clock, self._knows_clock = self._loop.clock, plan is not None
        clock.plan = plan or own
        lacking = [] if self._knows_clock else ["steps_per_round"]
        lacking += ["rounds"] if self._message.rounds is None else []
        if lacking:
            clock.endless = (
                "estimated_stepping_batches depends on the whole federation: the server must send "
                f"{' and '.join(lacking)} in ServerMessage"
            )

    def _take_message(self, binding: BoundParameters) -> None:
        message, trainer = self._message, self._trainer
        message.check_params(binding.theta)
        binding.theta.copy_(message.params)
        if message.buffers:
            self.side.buffers.put(message.buffers)
        check_visit_schedulers(trainer, self._knows_clock, message.round * self.side.schedules.steps)
        if trainer.lr_scheduler_configs:
            self.side.schedules.begin_round()
            self._loop.pass_rounds(message.round)

    def _take_rule_state(self, binding: BoundParameters) -> None:
        message, rule, theta = self._message, self._options.client_rule, binding.theta
        give(message, rule, self._client_id)
        if self._before is not None:
            if self._before["rule"]:
                rule.keep(self._client_id, self._before["rule"], self._before["round"])
            if self._before["optimizers"]:
                self.side.runner.optimizers.load_state_dict({self._client_id: self._before["optimizers"]})
        num_clients = self._num_clients or len(self.side.loaders)
        rule.begin_fit(Federation(num_clients, binding.layout, theta.device, theta.dtype, rounds=self._message.rounds))

    def close(self) -> None:
        """Gives the parameters storage of their own: the global parameters that the client received."""
        if self._binding is not None:
            self._binding.release()
        self._binding = None

    # ---- the round, as the epoch loop asks for it

    def open_round(self) -> Iterator[ClientTask]:
        """Yields the client, or an empty place."""
        assert self._binding is not None
        self._binding.check(self._trainer.optimizers)
        self._loop.progress.open_round()
        client, index, loaders = self._client_id, self._message.round, self.side.loaders
        size = len(loaders.indices(client))
        if size == 0:
            raise ValueError(f"client {client} must have training data, found none")
        tasks = [ClientTask(client, 0, index, size, loaders.num_batches(client))] if self._trains else []
        self.side.begin_round(tasks)
        yield from tasks or [ClientTask(None, 0, index)]

    def train_client(self, task: ClientTask) -> Tensor | None:
        """Trains the client."""
        self._upload = self.side.train(task)
        refuse_steps_by_hand(self._trainer, self._upload.pace.by_hand)
        self.side.schedules.arrived(self._client_id, self._upload.pace)
        return self._upload.train_loss

    def close_round(self) -> None:
        """Takes what the client leaves behind."""
        assert self._binding is not None
        self.side.end_round()
        counted = [self._client_id] if self._trains else []
        self.side.schedules.count(counted)
        self.side.merge([self._upload] if self._upload is not None else [], counted)
        if not self._trains:
            losses = self.side.losses_at(self._message.round, self._binding.theta, [self._client_id])
            self.loss = float(losses[0])

    def advance_schedules(self) -> None:
        """Moves schedulers and clock to the end of the round."""
        self.side.schedules.close_round()

    def end_epoch(self) -> None:
        """Nobody else is to stop."""

    def publish_round(self) -> None:
        """The learning-rate schedulers have stepped: packs what the client sends and keeps."""
        self._trainer.should_stop = True  # max_epochs is that of the federation
        upload, client = self._upload, self._client_id
        if upload is None:
            return
        side, report, optimizers = self.side, upload.report, self.side.runner.optimizers
        self.sent = ClientMessage(
            client_id=client,
            round=self._message.round,
            update=side.runner.rows.update(0).cpu(),
            size=upload.size,
            loss=upload.loss,
            train_loss=None if upload.train_loss is None else float(upload.train_loss),
            client_lr=upload.client_lr,
            extras=_on_cpu(report.extras),
            companions=_on_cpu(report.companions),
            buffers=_on_cpu(side.buffers.values_in(upload.buffers)),
            steps=upload.pace.steps,
        )
        kept = {"rule": report.kept, "round": self._message.round}
        if not report.kept and self._before is not None:  # what it had stays
            kept = {name: self._before[name] for name in ("rule", "round")}
        self.kept = {**kept, "optimizers": optimizers.take_aside(client)}


def _on_cpu(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in values.items()}
