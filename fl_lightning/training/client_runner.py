# SPDX-License-Identifier: Apache-2.0
"""The place where clients are trained: the bound module with all that one client's visit needs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule, LocalWork, Needs
from fl_lightning.core.lightning.epoch_loop import ClientTask, FederatedEpochLoop
from fl_lightning.core.lightning.fast_log import LogCall
from fl_lightning.core.lightning.names import LightningModule, Trainer
from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.simulation.server import Server
from fl_lightning.training.bound_parameters import BoundParameters
from fl_lightning.training.client_losses import ClientLosses
from fl_lightning.training.client_optimizers import ClientOptimizers, client_learning_rate
from fl_lightning.training.local_trainer import LocalTrainer
from fl_lightning.training.upload import Upload, with_accuracy

if TYPE_CHECKING:
    from fl_lightning.simulation.options import FitOptions


class ClientRunner:
    """Trains clients on the bound module, and lets the fit know what training left behind.

    Args:
        trainer: the trainer.
        loop: the federated epoch loop.
        rule: the client rule.
        binding: the bound module.
        options: the strategy's arguments.
        needs: what both rules ask for.
        server: owns the update matrix and the buffers.
        optimizers: the clients' optimizers.
        local: local training of one client.
        lean: local training takes the lean path, without Lightning's hooks.

    Attributes:
        lr: the clients' learning rate in this round, if the optimizer defines one.
        momentum: momentum of the clients' SGD in this round.
        losses: losses and accuracies of clients at the bound parameters.
        detour: why clients are trained one after the other although another executor was asked for, or ``None``.
    """

    def __init__(
        self,
        trainer: Trainer,
        loop: FederatedEpochLoop,
        rule: ClientRule,
        binding: BoundParameters,
        options: FitOptions,
        needs: Needs,
        server: Server,
        optimizers: ClientOptimizers,
        local: LocalTrainer,
        lean: bool,
    ) -> None:
        self.trainer, self.loop, self.rule, self.binding = trainer, loop, rule, binding
        self.options, self.needs, self.server, self.optimizers = options, needs, server, optimizers
        self.local, self.lean, self.losses = local, lean, ClientLosses(trainer, local, options.loss_batch_size)
        self.lr, self.momentum = client_learning_rate(trainer.optimizers)
        self.detour: str | None = None

    @property
    def module(self) -> LightningModule:
        """The module, bound to the global parameters between clients."""
        return self.trainer.lightning_module

    @property
    def loaders(self) -> ClientLoaders:
        """The clients' training data."""
        return self.local.loaders

    @property
    def data(self) -> object:
        """The trainer's data module, if any."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    # ---- one client

    def visit(self, task: ClientTask) -> Upload:
        """Trains one client; :meth:`tidy` has to follow, whether it succeeds or not.

        Returns:
            What it sends; row ``task.index`` of the update matrix holds its update.
        """
        client, theta, seed = task.client_id, self.binding.theta, self.options.seed
        assert client is not None
        asks = self.needs.losses or self.needs.accuracies
        measured = self.measure(client, task.round) if asks else {}
        with isolated(derive_seed(seed, "client", task.round, client), theta.device):
            row = self.server.open_row(task.index)
            work = LocalWork(
                client, task.round, self.module, self.binding.layout, self.binding.parameters, theta, row,
                task.num_samples, self.lr, self.momentum, batches=partial(self.local.data, client),
            )  # fmt: skip
            if self.needs.full_gradients:
                self.local.at_global(work)
                loss = self._upload_gradient(work)
                report = self.rule.end_client(work)
            else:
                self.optimizers.begin_client(client)
                loss = self.local.train(work)
                self.optimizers.end_client(client)
                self.server.settle_row(task.index)
                report = self.rule.end_client(work)
                self.server.close_row(task.index)
        self.falsify(task)
        if self.needs.accuracies:
            report = with_accuracy(report, measured["accuracy"], self.module)
        return Upload(
            task.index, client, task.num_samples, loss, measured.get("loss") if self.needs.losses else None,
            report, self.server.bank.report(task.num_samples),
        )  # fmt: skip

    def falsify(self, task: ClientTask) -> None:
        """Puts what a dishonest client sends in place of its update."""
        attack, client = self.options.attack, task.client_id
        if attack is not None and client is not None and client in attack.clients:
            seed = derive_seed(self.options.seed, "attack", task.round, client)
            attack.replace(self.server.rows[task.index], self.binding.theta, seed)

    def _upload_gradient(self, work: LocalWork) -> Tensor | None:
        """One full-batch step: the row is the learning rate times the full gradient."""
        assert self.lr is not None
        loss = self.local.full_gradient(work)
        for parameter, view in zip(work.parameters, work.layout.views(work.row), strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                gradient = gradient.to_dense()
            view.zero_() if gradient is None else torch.mul(gradient, self.lr, out=view)
        return loss

    def measure(self, client: int, index: int, needs: Needs | None = None) -> dict[str, float]:
        """Loss and accuracy of a client at the bound parameters in round ``index``, as far as they are needed."""
        with isolated(derive_seed(self.options.seed, "loss", index, client), self.binding.theta.device):
            try:
                return self.losses.measure(client, needs or self.needs)
            finally:
                self.server.bank.restore()

    def tidy(self) -> None:
        """Puts parameters, buffers and optimizers back to what they were before a client."""
        self.local.work = None
        self.binding.bind_global()
        self.server.bank.restore()
        self.optimizers.restore()

    # ---- clients that were trained elsewhere or all at once

    def count(self, steps: int) -> None:
        """Counts a client's optimizer steps, where :meth:`visit` did not."""
        self.loop.count_step(steps)

    def log(self, calls: Iterable[LogCall]) -> None:
        """Logs what a client logged, in its order, where :meth:`visit` did not."""
        self.local.log(calls)
