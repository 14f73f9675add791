# SPDX-License-Identifier: Apache-2.0
"""One federated fit: rounds are opened, clients trained, rounds closed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning._lightning import LightningModule, Trainer, rank_zero_info, rank_zero_warn
from fl_lightning.algorithms.base import ClientRule, Federation, LocalWork, Needs, ServerRule
from fl_lightning.attacks import Attack
from fl_lightning.binding import Binding
from fl_lightning.buffers import BufferBank, BufferPolicy
from fl_lightning.clients import ClientOptimizers, client_learning_rate
from fl_lightning.data.loaders import ClientLoaders
from fl_lightning.data.samplers import CohortSampler
from fl_lightning.local import LocalPlan, LocalTrainer, full_path_reason
from fl_lightning.loop import ClientTask, FederatedEpochLoop
from fl_lightning.records import RoundRecord
from fl_lightning.refusals import refuse_checkpoint, refuse_module, refuse_schedulers, refuse_selection
from fl_lightning.reports import Arrival, ClientError, ErrorPolicy, Round, with_accuracy
from fl_lightning.seeding import derive_seed, isolated
from fl_lightning.server import OptimizerFactory, Server, cohort_size


@dataclass(frozen=True)
class FitOptions:
    """The strategy's arguments that shape a fit; see :class:`fl_lightning.FederatedStrategy`."""

    clients_per_round: int | float
    plan: LocalPlan
    sampler: CohortSampler
    server_optimizer: OptimizerFactory | None
    keep_client_optimizers: bool
    buffers: BufferPolicy
    on_client_error: ErrorPolicy
    seed: int
    full_gradients: bool = False
    attack: Attack | None = None
    lean: bool | None = None


class FitSession:
    """Everything that lives as long as one call of ``trainer.fit``.

    Args:
        trainer: the trainer; its optimizers exist and the module is on its device.
        loop: the federated epoch loop.
        algorithm: the server rule.
        rule: the client rule.
        options: the strategy's arguments.
        loaders: the clients' training data.

    Raises:
        ValueError: the module, the optimizers or the data lack what the method needs.
    """

    def __init__(
        self,
        trainer: Trainer,
        loop: FederatedEpochLoop,
        algorithm: ServerRule,
        rule: ClientRule,
        options: FitOptions,
        binding: Binding,
        loaders: ClientLoaders,
    ) -> None:
        self._trainer, self._loop, self._options = trainer, loop, options
        self._module: LightningModule = trainer.lightning_module
        self.algorithm, self.rule, self.binding, self.loaders = algorithm, rule, binding, loaders
        self._needs: Needs = algorithm.needs | rule.needs | Needs(full_gradients=options.full_gradients)
        self._lr, self._momentum = client_learning_rate(trainer.optimizers)
        refuse_schedulers(trainer.lr_scheduler_configs)
        refuse_module(
            self._module, self._needs, rule, len(trainer.optimizers), self._lr, type(algorithm).__name__
        )  # fmt: skip
        if options.attack is not None:
            options.attack.check(len(loaders))
        capacity = cohort_size(options.clients_per_round, len(loaders))
        bank = BufferBank(self._module, options.buffers)
        self._server = Server(
            algorithm, rule, binding, bank, capacity, len(loaders), options.server_optimizer, options.on_client_error
        )
        self._optimizers = ClientOptimizers(trainer.optimizers, options.keep_client_optimizers)
        reason = full_path_reason(trainer, self._module)
        lean = reason is None if options.lean is None else options.lean
        self.path = "lean" if lean else f"full ({reason or 'asked for'})"
        self.local = LocalTrainer(loop, loaders, options.plan, rule, lean)
        self.round: Round | None = None
        self._drop_outs: frozenset[int] = frozenset()
        self._began = 0.0

    # ---- the fit

    def begin(self, states: dict[str, Any] | None) -> None:
        """Starts from nothing, or from the states of a checkpoint or an earlier fit."""
        if states is None:
            self.algorithm.reset()
            self.rule.reset()
        else:
            refuse_checkpoint(states["fit"], self._fit())
            self.algorithm.load_state_dict(states["algorithm"])
            self.rule.load_state_dict(states["client_rule"])
            self._optimizers.load_state_dict(states["client_optimizers"])
            if self._server.optimizer is not None:
                self._server.optimizer.load_state_dict(states["server_optimizer"])
        theta = self.binding.theta
        federation = Federation(
            len(self.loaders), self.binding.layout, theta.device, theta.dtype, len(self._server.rows)
        )
        self.algorithm.begin_fit(federation)
        self.rule.begin_fit(federation)
        rank_zero_info(self._memory_plan(federation))

    def reload(self, loaders: ClientLoaders) -> None:
        """Goes on with data loaded anew (``reload_dataloaders_every_n_epochs``).

        Raises:
            ValueError: they are of another number of clients.
        """
        if len(loaders) != len(self.loaders):
            raise ValueError(f"reloaded data must have the same {len(self.loaders)} clients, found {len(loaders)}")
        self.loaders = self.local.loaders = loaders

    def states(self) -> dict[str, Any]:
        """Everything that a bit-exact resume needs besides weights and loop counters."""
        optimizer = self._server.optimizer
        return {
            "fit": self._fit(),
            "algorithm": self.algorithm.state_dict(),
            "client_rule": self.rule.state_dict(),
            "client_optimizers": self._optimizers.state_dict(),
            "server_optimizer": None if optimizer is None else optimizer.state_dict(),
        }

    def scheduled_groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """A client optimizer's options per parameter group, as they are between clients."""
        return self._optimizers.groups(optimizer)

    def global_buffers(self) -> dict[str, Tensor]:
        """The buffers that a client in training has changed, as they were before it."""
        return {} if self.local.work is None else self._server.bank.values()

    def _fit(self) -> dict[str, Any]:
        """What a checkpoint should have in common with the fit that goes on from it."""
        server, options = self._server, self._options
        return {
            "method": f"{type(self.algorithm).__name__} with {type(self.rule).__name__}",
            "clients": len(self.loaders),
            "trainable parameters": self.binding.theta.numel(),
            "server_optimizer": "none" if server.optimizer is None else type(server.optimizer).__name__,
            "clients_per_round": len(server.rows),
            "local_epochs": options.plan.epochs,
            "local_steps": options.plan.steps,
            "client_optimizer_state": "keep" if options.keep_client_optimizers else "reset",
            "buffers": options.buffers,
            "full_gradients": self._needs.full_gradients,
            "seed": options.seed,
        }

    def _memory_plan(self, federation: Federation) -> str:
        theta, rows = self.binding.theta, self._server.rows
        parts = {
            "global parameters": theta.numel() * theta.element_size(),
            f"update matrix ({rows.shape[0]} x {rows.shape[1]})": rows.numel() * rows.element_size(),
            **self.algorithm.memory(federation, rows.shape[0]),
            **self.rule.memory(federation, rows.shape[0]),
        }
        if (buffers := self._server.bank.nbytes) > 0:
            parts[f"buffers ({rows.shape[0] + 1} copies)"] = (rows.shape[0] + 1) * buffers
        if self._server.optimizer is not None:
            parts["server optimizer (up to)"] = 2 * theta.numel() * theta.element_size()
        if self._options.keep_client_optimizers:
            parts[f"client optimizers (up to, {len(self.loaders)} clients)"] = (
                2 * len(self.loaders) * theta.numel() * theta.element_size()
            )
        listed = ", ".join(f"{name} {size:,} B" for name, size in parts.items())
        return f"Federated fit on {theta.device}, {self.path} path. Memory beside the module: {listed}"

    # ---- a round

    def open_round(self, index: int) -> Iterator[ClientTask]:
        """Draws the cohort and yields one task per place."""
        self.binding.check()
        self._began = time.perf_counter()
        size = len(self._server.rows)
        seed = derive_seed(self._options.seed, "sampler")
        selection = self._options.sampler.select(index, size, self.loaders.sizes, seed)
        refuse_selection(selection.client_ids, size, len(self.loaders), type(self._options.sampler).__name__)
        self._drop_outs = frozenset(selection.drop_outs)
        self.round = Round(index)
        self._server.bank.remember()
        self._lr, self._momentum = client_learning_rate(self._trainer.optimizers)
        self._optimizers.begin_round()
        for place in range(size):
            if place < len(selection.client_ids):
                client = int(selection.client_ids[place])
                yield ClientTask(
                    client, place, index, int(self.loaders.sizes[client]), self.loaders.num_batches(client)
                )
            else:
                yield ClientTask(None, place, index)

    def train_client(self, task: ClientTask) -> Tensor | None:
        """Trains one client; returns its mean loss, or ``None`` if it was left out."""
        current, client = self.round, task.client_id
        assert current is not None
        assert client is not None
        if client in self._drop_outs:
            current.dropped[client] = "dropped out"
            return None
        if task.num_samples == 0:
            self._server.drop(current, client, "it has no training data")
            return None
        try:
            arrival = self._visit(task, client)
        except Exception as error:
            if self._options.on_client_error == "raise":
                reason = f"{type(error).__name__}: {error}"
                raise ClientError(f"client {client} in round {current.index}: {reason}") from error
            self._server.drop(current, client, f"{type(error).__name__}: {error}")
            self.binding.thaw()
            return None
        finally:
            self.local.work = None
            self.binding.bind_global()
            self._server.bank.restore()
            self._optimizers.restore()
        current.arrivals.append(arrival)
        return arrival.train_loss

    def _visit(self, task: ClientTask, client: int) -> Arrival:
        theta, seed = self.binding.theta, self._options.seed
        measured = self._measure(client) if self._needs.losses or self._needs.accuracies else {}
        with isolated(derive_seed(seed, "client", task.round, client), theta.device):
            row = self._server.open_row(task.index)
            work = LocalWork(
                client, task.round, self._module, self.binding.layout, self.binding.parameters, theta, row,
                task.num_samples, self._lr, self._momentum, batches=partial(self.local.data, client),
            )  # fmt: skip
            if self._needs.full_gradients:
                self.local.at_global(work)
                loss = self._upload_gradient(work)
                report = self.rule.end_client(work)
            else:
                self._optimizers.begin_client(client)
                loss = self.local.train(work)
                self._optimizers.end_client(client)
                self._server.settle_row(task.index)
                report = self.rule.end_client(work)
                self._server.close_row(task.index)
        attack = self._options.attack
        if attack is not None and client in attack.clients:
            attack.replace(row, derive_seed(seed, "attack", task.round, client))
        if self._needs.accuracies:
            report = with_accuracy(report, measured["accuracy"], self._module)
        return Arrival(
            task.index, client, task.num_samples, loss, measured.get("loss") if self._needs.losses else None,
            report, self._server.bank.report(task.num_samples),
        )  # fmt: skip

    def _upload_gradient(self, work: LocalWork) -> Tensor | None:
        """One full-batch step: the row is the learning rate times the full gradient."""
        assert self._lr is not None
        loss = self.local.full_gradient(work)
        for parameter, view in zip(work.parameters, work.layout.views(work.row), strict=True):
            gradient = parameter.grad
            view.zero_() if gradient is None else torch.mul(gradient, self._lr, out=view)
        return loss

    def _measure(self, client: int, needs: Needs | None = None) -> dict[str, float]:
        assert self.round is not None
        with isolated(derive_seed(self._options.seed, "loss", self.round.index, client), self.binding.theta.device):
            try:
                return self.local.measure(client, needs or self._needs)
            finally:
                self._server.bank.restore()

    def _losses_at(self, params: Tensor, clients: Sequence[int]) -> Tensor:
        self.binding.bind_flat(params.detach().to(self.binding.theta.dtype).contiguous())
        try:
            losses = [self._measure(client, Needs(losses=True))["loss"] for client in clients]
            return torch.tensor(losses, dtype=torch.float64)
        finally:
            self.binding.bind_global()

    def close_round(self) -> RoundRecord:
        """Aggregates the reports that arrived and applies the step."""
        current = self.round
        assert current is not None
        self._optimizers.restore()
        self.binding.check_frozen()
        began = self._began
        record = self._server.close(
            current, self._lr, self._losses_at if self._needs.requery else None, lambda: time.perf_counter() - began
        )
        self._optimizers.commit(record.client_ids)
        self.round = None
        if not record.client_ids:
            rank_zero_warn(f"round {record.round} had no usable report: the global model is unchanged")
        return record
