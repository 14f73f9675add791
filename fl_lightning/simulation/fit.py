# SPDX-License-Identifier: Apache-2.0
"""One federated fit: rounds are opened, clients trained, rounds closed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.algorithms.base import ClientRule, Federation, Needs, ServerRule
from fl_lightning.core.layout import layout_fingerprint
from fl_lightning.core.lightning.epoch_loop import ClientTask, FederatedEpochLoop
from fl_lightning.core.lightning.names import LightningModule, Trainer, rank_zero_info, rank_zero_warn
from fl_lightning.core.records import RoundRecord
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.data.cohort_samplers import cohort_size
from fl_lightning.executors.base import Executor, Runner
from fl_lightning.executors.sequential import Sequential
from fl_lightning.simulation.checks import refuse_module, refuse_schedulers, refuse_selection
from fl_lightning.simulation.options import FitOptions
from fl_lightning.simulation.resume_checks import refuse_checkpoint
from fl_lightning.simulation.server import Server
from fl_lightning.simulation.uploads import Round
from fl_lightning.training.bound_parameters import BoundParameters
from fl_lightning.training.buffers import BufferBank
from fl_lightning.training.client_optimizers import ClientOptimizers, client_learning_rate
from fl_lightning.training.client_runner import ClientRunner
from fl_lightning.training.local_plan import full_path_reason
from fl_lightning.training.local_trainer import LocalTrainer


class FederatedFit:
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
        binding: BoundParameters,
        loaders: ClientLoaders,
    ) -> None:
        self._trainer, self._loop, self._options = trainer, loop, options
        self._module: LightningModule = trainer.lightning_module
        self.algorithm, self.rule, self.binding, self.loaders = algorithm, rule, binding, loaders
        self._needs: Needs = algorithm.needs | rule.needs | Needs(full_gradients=options.full_gradients)
        refuse_schedulers(trainer.lr_scheduler_configs)
        self._refuse_module()
        if options.attack is not None:
            options.attack.check(len(loaders))
        capacity = cohort_size(options.clients_per_round, len(loaders))
        bank = BufferBank(self._module, options.buffers)
        self._server = Server(
            algorithm, rule, binding, bank, capacity, len(loaders), options.server_optimizer, options.on_client_error,
            options.executor.rows,
        )  # fmt: skip
        self._optimizers = ClientOptimizers(trainer.optimizers, options.keep_client_optimizers)
        reason = full_path_reason(trainer, self._module)
        lean = reason is None if options.lean is None else options.lean
        self.path = "lean" if lean else f"full ({reason or 'asked for'})"
        self.local = LocalTrainer(loop, loaders, options.plan, rule, lean)
        self.bench = ClientRunner(
            trainer, loop, rule, binding, options, self._needs, self._server, self._optimizers, self.local, lean
        )
        self._crew: Runner = self._choose(options.executor)
        self.round: Round | None = None
        self._drop_outs: frozenset[int] = frozenset()
        self._began = 0.0

    def _refuse_module(self) -> None:
        optimizers = self._trainer.optimizers
        client_lr, _ = client_learning_rate(optimizers)
        refuse_module(
            self._module, self._needs, self.rule, len(optimizers), client_lr, type(self.algorithm).__name__
        )  # fmt: skip

    def _choose(self, executor: Executor) -> Runner:
        obstacle = executor.obstacle(self.bench)
        if obstacle is not None:
            rank_zero_info(f"{type(executor).__name__} trains this fit's clients one after the other: {obstacle}")
            self.bench.detour = obstacle
            executor = Sequential()
        return executor.crew(self.bench)

    # ---- the fit

    def begin(self, states: dict[str, Any] | None) -> None:
        """Starts from nothing, or from the states of a checkpoint or an earlier fit."""
        if states is None:
            self.algorithm.reset()
            self.rule.reset()
        else:
            path = self._trainer.ckpt_path
            source = "the last fit's state" if path is None else f"the checkpoint {path}"
            refuse_checkpoint(states["fit"], self._fit(), source)
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
            "layout": layout_fingerprint(self.binding.layout),
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
        self._follow_optimizers()
        self.bench.lr, self.bench.momentum = client_learning_rate(self._trainer.optimizers)
        self._optimizers.begin_round()
        tasks = [
            ClientTask(int(client), place, index, int(self.loaders.sizes[client]), self.loaders.num_batches(client))
            for place, client in enumerate(selection.client_ids)
        ]
        self._crew.begin_round([t for t in tasks if t.num_samples > 0 and t.client_id not in self._drop_outs])
        yield from tasks
        for place in range(len(tasks), size):
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
        self._follow_optimizers()
        try:
            arrival = self._crew.train(task)
        except Exception as error:
            self._server.drop(current, client, f"{type(error).__name__}: {error}", error)
            self.binding.thaw()
            return None
        finally:
            self.bench.tidy()
        current.arrivals.append(arrival)
        return arrival.train_loss

    def _follow_optimizers(self) -> None:
        """Goes on with the trainer's present optimizers, if somebody has replaced them since the last client."""
        trainer = self._trainer
        if not self._optimizers.follow(trainer.optimizers):
            return
        self._refuse_module()
        trainer.optimizers = list(trainer.optimizers)  # Lightning steps with wrappers that it makes of a new list
        self.local.take_optimizer(trainer.optimizers[0])
        self.bench.lr, self.bench.momentum = client_learning_rate(trainer.optimizers)

    def _losses_at(self, params: Tensor, clients: Sequence[int]) -> Tensor:
        assert self.round is not None
        index, needs = self.round.index, Needs(losses=True)
        self.binding.bind_flat(params.detach().to(self.binding.theta.dtype).contiguous())
        try:
            losses = [self.bench.measure(client, index, needs)["loss"] for client in clients]
            return torch.tensor(losses, dtype=torch.float64)
        finally:
            self.binding.bind_global()

    def close_round(self) -> RoundRecord:
        """Aggregates the reports that arrived and applies the step."""
        current = self.round
        assert current is not None
        self._crew.end_round()
        self._optimizers.restore()
        self.binding.check_frozen()
        began = self._began
        record = self._server.close(
            current,
            self.bench.lr,
            self._losses_at if self._needs.requery else None,
            lambda: time.perf_counter() - began,
        )
        self._optimizers.commit(record.client_ids)
        self.round = None
        if not record.client_ids:
            rank_zero_warn(f"round {record.round} had no usable report: the global model is unchanged")
        return record

    def close(self) -> None:
        """The fit is over, however it ended."""
        self._crew.close()
