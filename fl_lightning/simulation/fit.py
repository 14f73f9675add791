# SPDX-License-Identifier: Apache-2.0
"""One federated fit: rounds are opened, clients trained, rounds closed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.algorithms.base import Federation, Needs
from fl_lightning.core.lightning.epoch_loop import ClientTask, FederatedEpochLoop
from fl_lightning.core.lightning.names import Trainer, rank_zero_info, rank_zero_warn
from fl_lightning.core.records import RoundRecord
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.data.cohort_samplers import cohort_size
from fl_lightning.executors.base import CohortRunner, Executor
from fl_lightning.executors.sequential import SequentialRunner
from fl_lightning.simulation.checks import check_module, check_schedulers, check_selection
from fl_lightning.simulation.memory_plan import memory_plan
from fl_lightning.simulation.options import FitOptions
from fl_lightning.simulation.resume_checks import check_resume, fit_description
from fl_lightning.simulation.server import Server
from fl_lightning.simulation.uploads import Round
from fl_lightning.training.bound_parameters import BoundParameters
from fl_lightning.training.buffers import BufferBank
from fl_lightning.training.client_optimizers import client_learning_rate
from fl_lightning.training.client_runner import ClientRunner
from fl_lightning.training.update_rows import UpdateRows


class FederatedFit:
    """Everything that lives as long as one call of ``trainer.fit``.

    Args:
        trainer: the trainer; its optimizers exist and the module is on its device.
        loop: the federated epoch loop.
        options: the strategy's arguments.
        limit: the trainer's ``limit_train_batches``.
        binding: the bound module.
        loaders: the clients' training data.

    Attributes:
        runner: trains single clients.

    Raises:
        ValueError: the module, the optimizers or the data lack what the method needs.
    """

    def __init__(
        self,
        trainer: Trainer,
        loop: FederatedEpochLoop,
        options: FitOptions,
        limit: int | float,
        binding: BoundParameters,
        loaders: ClientLoaders,
    ) -> None:
        self._trainer, self._options, self._binding = trainer, options, binding
        self._algorithm, self._rule = options.algorithm, options.client_rule
        self._needs = self._algorithm.needs | self._rule.needs | Needs(full_gradients=options.full_gradients)
        check_schedulers(trainer.lr_scheduler_configs)
        self._check_module()
        if options.attack is not None:
            options.attack.check(len(loaders))
        self._buffers = BufferBank(trainer.lightning_module, options.buffers)
        self._server = Server(
            self._algorithm, self._rule, binding, self._buffers, len(loaders), options.server_optimizer,
            options.on_client_error,
        )  # fmt: skip
        self._server.names = loaders.names
        capacity = cohort_size(options.clients_per_round, len(loaders))
        rows = UpdateRows(binding, capacity, options.executor.rows)
        self.runner = ClientRunner(
            trainer, loop, self._rule, binding, options.local(limit), self._needs, loaders, rows, self._buffers
        )
        self._clients = self._cohort_runner(options.executor)
        self._round: Round | None = None
        self._drop_outs: frozenset[int] = frozenset()
        self._began = 0.0

    def _check_module(self) -> None:
        trainer = self._trainer
        client_lr, _ = client_learning_rate(trainer.optimizers)
        method = type(self._algorithm).__name__
        check_module(trainer.lightning_module, self._needs, self._rule, len(trainer.optimizers), client_lr, method)

    def _cohort_runner(self, executor: Executor) -> CohortRunner:
        obstacle = executor.obstacle(self.runner)
        if obstacle is None:
            return executor.runner(self.runner)
        rank_zero_info(f"{type(executor).__name__} trains this fit's clients one after the other: {obstacle}")
        return SequentialRunner(self.runner, obstacle)

    @property
    def executor_fallback(self) -> str | None:
        """Why clients train one after the other although another executor was asked for, or ``None``."""
        return self._clients.fallback

    # ---- the fit

    def begin(self, states: Mapping[str, Any] | None) -> None:
        """Starts from nothing, or from the states of a checkpoint or an earlier fit."""
        algorithm, rule, server = self._algorithm, self._rule, self._server
        if states is None:
            algorithm.reset()
            rule.reset()
        else:
            path = self._trainer.ckpt_path
            source = "the last fit's state" if path is None else f"the checkpoint {path}"
            check_resume(states["fit"], self._description(), source)
            algorithm.load_state_dict(states["algorithm"])
            rule.load_state_dict(states["client_rule"])
            self.runner.optimizers.load_state_dict(states["client_optimizers"])
            if server.optimizer is not None:
                server.optimizer.load_state_dict(states["server_optimizer"])
        theta, layout = self._binding.theta, self._binding.layout
        federation = Federation(self._num_clients, layout, theta.device, theta.dtype, len(self.runner.rows))
        algorithm.begin_fit(federation)
        rule.begin_fit(federation)
        options = self._options
        plan = memory_plan(
            federation, (algorithm, rule), self._buffers.nbytes, server.optimizer is not None,
            options.client_optimizer_state == "keep",
        )  # fmt: skip
        reason = self.runner.full_path
        path_taken = "lean" if reason is None else f"full ({reason})"
        rank_zero_info(f"Federated fit on {theta.device}, {path_taken} path. Memory beside the module: {plan}")

    def reload(self, loaders: ClientLoaders) -> None:
        """Goes on with data loaded anew (``reload_dataloaders_every_n_epochs``).

        Raises:
            ValueError: they are of another number of clients.
        """
        if len(loaders) != self._num_clients:
            raise ValueError(f"reloaded data must have the same {self._num_clients} clients, found {len(loaders)}")
        self.runner.batches.loaders = loaders

    @property
    def _num_clients(self) -> int:
        return len(self.runner.batches.loaders)

    def states(self) -> dict[str, Any]:
        """Everything that a bit-exact resume needs besides weights and loop counters."""
        optimizer = self._server.optimizer
        return {
            "fit": self._description(),
            "algorithm": self._algorithm.state_dict(),
            "client_rule": self._rule.state_dict(),
            "client_optimizers": self.runner.optimizers.state_dict(),
            "server_optimizer": None if optimizer is None else optimizer.state_dict(),
        }

    def _description(self) -> dict[str, Any]:
        return fit_description(
            self._options, self._needs, self._binding.layout, self._server.optimizer, self._num_clients,
            len(self.runner.rows),
        )  # fmt: skip

    def scheduled_groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """A client optimizer's options per parameter group, as they are between clients."""
        return self.runner.optimizers.groups(optimizer)

    def global_buffers(self) -> dict[str, Tensor]:
        """The buffers that a client in training has changed, as they were before it."""
        return self._buffers.values() if self.runner.in_training else {}

    # ---- a round

    def open_round(self, index: int) -> Iterator[ClientTask]:
        """Draws the cohort and yields one task per place."""
        self._binding.check()
        self._began = time.perf_counter()
        runner, loaders, options = self.runner, self.runner.batches.loaders, self._options
        size = len(runner.rows)
        seed = derive_seed(options.seed, "sampler")
        selection = options.sampler.select(index, size, loaders.sizes, seed)
        check_selection(selection.client_ids, size, len(loaders), type(options.sampler).__name__)
        self._drop_outs = frozenset(selection.drop_outs)
        self._round = Round(index)
        self._follow_optimizers()
        runner.begin_round()
        tasks = [
            ClientTask(int(client), place, index, int(loaders.sizes[client]), loaders.num_batches(client))
            for place, client in enumerate(selection.client_ids)
        ]
        self._clients.begin_round([t for t in tasks if t.num_samples > 0 and t.client_id not in self._drop_outs])
        yield from tasks
        for place in range(len(tasks), size):
            yield ClientTask(None, place, index)

    def train_client(self, task: ClientTask) -> Tensor | None:
        """Trains one client; returns its mean loss, or ``None`` if it was left out."""
        current, client = self._round, task.client_id
        assert current is not None
        assert client is not None
        if client in self._drop_outs:
            current.dropped[client] = "dropped out"
            return None
        if task.num_samples == 0:
            self._server.drop(current, client, "it has no training data")
            return None
        self._follow_optimizers()
        failed = True
        try:
            upload = self._clients.train(task)
            failed = False
        except Exception as error:
            self._server.drop(current, client, f"{type(error).__name__}: {error}", error)
            return None
        finally:
            self.runner.restore(failed)
        current.uploads.append(upload)
        return upload.train_loss

    def _follow_optimizers(self) -> None:
        """Uses the trainer's present optimizers from now on, if they were replaced since the last client."""
        if self.runner.follow_optimizers():
            self._check_module()

    def _losses_at(self, params: Tensor, clients: Sequence[int]) -> Tensor:
        assert self._round is not None
        index, needs = self._round.index, Needs(losses=True)
        self._binding.bind_flat(params.detach().to(self._binding.theta.dtype))
        try:
            losses = [self.runner.measure(client, index, needs)["loss"] for client in clients]
            return torch.tensor(losses, dtype=torch.float64)
        finally:
            self._binding.bind_global()

    def close_round(self) -> RoundRecord:
        """Aggregates the uploads that arrived and applies the step."""
        current, runner = self._round, self.runner
        assert current is not None
        self._clients.end_round()
        runner.optimizers.restore()
        runner.check_frozen()
        began = self._began
        record = self._server.close_round(
            current,
            runner.rows,
            runner.optimizers.lr,
            self._losses_at if self._needs.requery else None,
            lambda: time.perf_counter() - began,
        )
        runner.optimizers.commit(record.client_ids)
        self._round = None
        if not record.client_ids:
            rank_zero_warn(f"round {record.round} had no usable report: the global model is unchanged")
        return record

    def close(self) -> None:
        """The fit is over, however it ended."""
        self._clients.close()
