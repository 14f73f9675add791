# SPDX-License-Identifier: Apache-2.0
"""Local training of one client on the bound module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.records import LocalWork
from fl_lightning.clients.client_batches import ClientBatches
from fl_lightning.clients.client_hooks import ClientHooks
from fl_lightning.clients.local_steps import LocalStep
from fl_lightning.clients.module_calls import ModuleCalls
from fl_lightning.lightning.fast_log import TrainingLog
from fl_lightning.lightning.names import Trainer
from fl_lightning.lightning.round_clock import VisitClock


class LocalTrainer:
    """Takes a client's local steps.

    Attributes:
        step: takes one step.
        log: takes the place of the module's ``log``.
        skipped: batches of the last visit without a loss, with automatic optimization.
    """

    def __init__(
        self,
        trainer: Trainer,
        calls: ModuleCalls,
        batches: ClientBatches,
        rule: ClientRule,
        hooks: ClientHooks,
        step: LocalStep,
        log: TrainingLog,
        clock: VisitClock,
    ) -> None:
        self._clock, self._precision, self._calls, self._batches = clock, trainer.precision_plugin, calls, batches
        self._rule, self._hooks, self.step, self.log = rule, hooks, step, log
        self._automatic, self.skipped = trainer.lightning_module.automatic_optimization, 0
        self._passed = 0  # batches in earlier passes of the visit

    def train(self, work: LocalWork) -> Tensor | None:
        """Trains the client's parameters.

        Returns:
            The sample-weighted mean of the training losses, or ``None`` if the module reported none.

        Raises:
            ValueError: the client has no batch.
        """
        hooks = self._hooks
        hooks.work = work
        work.forward_context, work.own_loss, self._passed = self._precision.train_step_context, self._own_loss, 0
        self._rule.begin_client(work)
        self.log.install(self.step.hook)
        hooks.install()
        self.step.begin_visit()
        losses: list[Tensor] = []
        sizes: list[int] = []
        done, clock, opens, self.skipped = 0, self._clock, True, 0
        try:
            for batch, size, hooks.index, ends_pass, is_last in self._batches.in_training(work.client_id, work.round):
                place, self._passed = hooks.index % work.window, done - hooks.index
                opens = opens or place == 0
                clock.begin_batch(is_last, opens, ends_pass or place + 1 == work.window)
                # A collate_fn that finds no sample to use gives no batch, as in Lightning; then the next one opens.
                loss, stop = None, False
                if batch is not None:
                    loss, stop = self.step(batch, done, size)
                    opens = False
                done += 1
                if loss is not None:
                    losses.append(loss.reshape(()) if loss.dim() else loss)
                    sizes.append(size)
                if stop:
                    break
                self.skipped += loss is None and self._automatic
        finally:
            self.log.remove()
            hooks.remove()
        if done == 0:
            raise ValueError(f"client {work.client_id} has no batch to train on ({work.num_samples} samples)")
        return _weighted_mean(losses, sizes) if losses else None

    def _own_loss(self, batch: Any, index: int) -> Tensor:
        """The module's loss of a batch of the present pass, under its place in the visit, as ``training_step`` is."""
        return self._calls.unlogged_loss(batch, index + self._passed)


def _weighted_mean(losses: list[Tensor], sizes: list[int]) -> Tensor:
    # Once per client: adding up after every step would cost two more operations in each. Half precision has no room for
    # a sum over a client's samples.
    if all(loss.device.type == "cpu" for loss in losses):
        total = sum(loss.item() * size for loss, size in zip(losses, sizes, strict=True))
        kind = losses[0].dtype
        return torch.tensor(total / sum(sizes), dtype=kind if kind.itemsize > 2 else torch.float32)
    wide = torch.stack(losses)
    wide = wide if wide.dtype.itemsize > 2 else wide.float()
    return (wide * torch.tensor(sizes, dtype=wide.dtype, device=wide.device)).sum() / sum(sizes)
