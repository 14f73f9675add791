# SPDX-License-Identifier: Apache-2.0
"""One client's visit: loads the global parameters, runs local training, returns the client's upload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.records import ClientReport, LocalWork, Needs
from fl_lightning.arguments import trusted
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.clients.client_batches import ClientBatches, ClientLosses, LocalOptions, ModuleCalls
from fl_lightning.clients.client_optimizers import ClientOptimizers
from fl_lightning.clients.local_training import ClientHooks, LocalTrainer
from fl_lightning.clients.module_isolation import ModuleIsolation
from fl_lightning.clients.schedules import Schedules
from fl_lightning.clients.update_rows import UpdateRows, Upload
from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.lightning.batches import ClientTask
from fl_lightning.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.lightning.fast_sgd import FastSGD
from fl_lightning.lightning.inspection import full_path_reason
from fl_lightning.lightning.module.generators import generators_in, seeded
from fl_lightning.lightning.names import LightningModule, Trainer


class ClientRunner:
    """Trains one client at a time on the bound module; owns all that local training needs."""

    def __init__(
        self,
        trainer: Trainer,
        loop: FederatedEpochLoop,
        rule: ClientRule,
        binding: BoundParameters,
        options: LocalOptions,
        needs: Needs,
        batches: ClientBatches,
        rows: UpdateRows,
        buffers: BufferBank,
    ) -> None:
        self.trainer, self.rule, self.rows = trainer, rule, rows
        self.loop, self._binding, self._buffers = loop, binding, buffers
        self.options, self._needs = options, needs
        self.full_path = full_path_reason(trainer, self.module)  # why local steps run through Lightning's own loop
        self.optimizers = ClientOptimizers(trainer, options.keeps_optimizer)
        self.schedules = Schedules(trainer, loop.clock, self.optimizers)
        self.hooks = ClientHooks(self.module, rule)
        self.isolation = ModuleIsolation(self.module)  # of what the module has beside parameters and buffers
        self.batches = batches
        self._calls = ModuleCalls(trainer)
        optimizer = FastSGD(trainer.optimizers[0]) if self.full_path is None else None
        self.local = LocalTrainer(loop, self._calls, batches, rule, self.hooks, optimizer)
        self.losses = ClientLosses(self._calls, batches, options.loss_batch_size)
        self.generators: list[Any] = []  # random generators that the training data keep for themselves

    @property
    def module(self) -> LightningModule:
        """The module, bound to the global parameters between clients."""
        return self.trainer.lightning_module

    @property
    def global_params(self) -> Tensor:
        """``[n]`` the global parameters."""
        return self._binding.theta

    # ---- one client

    def train(self, task: ClientTask) -> Upload:
        """Trains one client, whose update is then in its row; :meth:`restore` has to follow, also after an error."""
        client = task.client_id
        assert client is not None
        needs, optimizers, theta = self._needs, self.optimizers, self.global_params
        measured, loss_batch_factor = dict[str, float](), None
        if needs.losses or needs.accuracies:
            measured, loss_batch_factor = self._measure(client, task.round, needs, looks=True)
        with self._isolated(theta.device, "client", task.round, client):
            self.rows.open(task.index)
            work = trusted(LocalWork)(
                client, task.round, self.module, self._binding.layout, self._binding.parameters, theta,
                task.num_samples, optimizers.lr, optimizers.momentum, batches=partial(self._batches_of, client),
                window=self.batches.window,
            )  # fmt: skip
            optimizers.begin_client(client)
            moves = self.schedules.begin_visit()
            self.isolation.begin()
            # The rule sees the learning rate of each step where something may change it within a visit.
            changes = optimizers.lr is not None and (moves or self.full_path is not None)
            self.hooks.rate = optimizers.present_lr if changes else None
            if needs.full_gradients:
                loss: Tensor | None = self.local.full_gradient(work, self.rows.row(task.index))
                self._binding.check_flags()
                report = self.rule.end_client(work)
                self.rows.received(task.index)
            else:
                loss = self.local.train(work)
                optimizers.end_client(client)
                work.end_steps()
                self._binding.check_flags()
                self.rows.reclaim()
                report = self.rule.end_client(work)
                self.rows.close(task.index)
            step_counts = self.schedules.end_visit()
            module_change, hand_set = self.isolation.end(), self.schedules.set_by_hand()
        # Dishonest clients train like all others, and the attack then sees the update that they would have sent.
        if (attack := self.options.attack_of(client)) is not None:
            seed = derive_seed(self.options.seed, "attack", task.round, client)
            attack.replace(self.rows.update(task.index), theta, seed)
        if needs.accuracies:
            report = _with_accuracy(report, measured["accuracy"], self.module)
        return Upload(
            task.index, client, task.num_samples, loss, measured.get("loss") if needs.losses else None,
            report, self._buffers.report(task.num_samples), work.client_lr, step_counts,
            0 if needs.full_gradients else self.local.skipped, module_change, hand_set,
            loss_batch_factor,
        )  # fmt: skip

    def _batches_of(self, client: int) -> Iterator[tuple[Any, int]]:
        for batch, size in self.batches.in_order(client):
            yield self._calls.converted(batch), size

    def measure(self, client: int, round: int, needs: Needs) -> dict[str, float]:  # noqa: A002
        """Loss and accuracy of a client at the bound parameters, as far as ``needs`` names them."""
        return self._measure(client, round, needs)[0]

    def _measure(
        self, client: int, round: int, needs: Needs, looks: bool = False  # noqa: A002
    ) -> tuple[dict[str, float], int | None]:  # fmt: skip
        measured, factor = self.losses.measure(client, needs, partial(self._measuring, round, client), looks)
        attack = self.options.attack_of(client)
        return measured if attack is None else attack.report(measured), factor

    @contextmanager
    def _measuring(self, round: int, client: int) -> Iterator[None]:  # noqa: A002
        with self._isolated(self.global_params.device, "loss", round, client):
            try:
                yield
            finally:
                self._buffers.restore()

    @contextmanager
    def _isolated(self, device: torch.device, *parts: int | str) -> Iterator[None]:
        """Random numbers, those of the data's own generators too, depend on nothing but these parts."""
        seed = self.options.seed
        with isolated(derive_seed(seed, *parts), device), seeded(self.generators, seed, *parts):
            yield

    def restore(self) -> None:
        """Puts parameters, buffers and optimizers back to what they were before a client."""
        self._binding.restore_flags()
        self.hooks.work = None
        self._binding.bind_global()
        self._buffers.restore()
        self.isolation.restore()
        self.schedules.restore()
        self.optimizers.restore()

    # ---- between clients

    def begin_round(self) -> None:
        """Takes options of optimizers and buffers as every client's starting point of the round."""
        self._buffers.remember()
        self.generators = self._own_generators()
        self.schedules.begin_round()
        self.optimizers.begin_round()
        self.rows.begin_round()

    def _own_generators(self) -> list[Any]:
        loaders, roots = self.batches.loaders, list[object]()
        if not loaders.in_memory:
            roots += [loaders.dataset, loaders.settings.collate_fn]
        if self._calls.hooked:
            roots.append(self.trainer.datamodule)  # type: ignore[attr-defined]
        return generators_in(*roots) if roots else []

    def take_optimizers(self) -> None:
        """The trainer's optimizers were replaced by others, which :attr:`optimizers` follows already."""
        trainer = self.trainer
        trainer.optimizers = list(trainer.optimizers)  # Lightning steps with wrappers that it makes of a new list
        if self.local.optimizer is not None:
            self.local.optimizer.follow(trainer.optimizers[0])

    def expected_cost(self, task: ClientTask) -> int:
        """How long a client takes beside others: optimizer steps, or samples where it uploads a full gradient."""
        return task.num_samples if self._needs.full_gradients else self.batches.expected_steps(task.client_id or 0)

    def check_round(self) -> None:
        """All clients of a round that train here were trained; a ValueError says what they must not have changed."""
        self._binding.check_frozen()


def _with_accuracy(report: ClientReport, accuracy: float, module: object) -> ClientReport:
    """Adds what the module says about its accuracy to what the client rule sends."""
    if not 0 <= accuracy <= 1:
        name = type(module).__name__
        raise ValueError(f"{name}.federated_accuracy must return a share between 0 and 1, found {accuracy}")
    return replace(report, extras={**report.extras, "accuracy": torch.tensor(accuracy, dtype=torch.float64)})
