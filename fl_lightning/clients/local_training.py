# SPDX-License-Identifier: Apache-2.0
"""Local training of one client on the bound module, the full gradient in its place, and losses of a client's data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule, overrides
from fl_lightning.algorithms.records import LocalWork, Needs
from fl_lightning.clients.client_batches import ClientBatches
from fl_lightning.clients.client_hooks import ClientHooks
from fl_lightning.clients.local_steps import LocalStep, ModuleCalls
from fl_lightning.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.lightning.fast_log import TrainingLog
from fl_lightning.lightning.names import Trainer
from fl_lightning.lightning.round_clock import VisitClock


class LocalTrainer:
    """Takes a client's local steps."""

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
        self._rule, self._hooks, self.step, self.log = rule, hooks, step, log  # in place of the module's ``log``
        self._automatic = trainer.lightning_module.automatic_optimization
        self._passed = self.skipped = 0  # of the visit: batches in earlier passes; without a loss, if automatic

    def train(self, work: LocalWork) -> Tensor | None:
        """Trains the client's parameters; the sample-weighted mean of the losses, if the module reported any."""
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


@dataclass(frozen=True)
class FullGradients:
    """Uploads the gradient of all of a client's data, in place of local training (FedSGD)."""

    trainer: Trainer
    loop: FederatedEpochLoop
    calls: ModuleCalls
    batches: ClientBatches
    rule: ClientRule

    def step(self, work: LocalWork, log: TrainingLog, out: Tensor) -> Tensor:
        """Writes the learning rate times a client's full gradient to ``out`` (``[n]``); returns its mean loss."""
        if overrides(self.rule, "begin_client"):  # it looks at the client's data at the global parameters
            work.forward_context = self.trainer.precision_plugin.val_step_context
            with self.calls.undone():
                self.rule.begin_client(work)
        log.install("training_step")
        try:
            loss = self._gradient(work, out)
        finally:
            log.remove()
        self.loop.count_step()
        work.steps += 1
        return loss

    def _gradient(self, work: LocalWork, out: Tensor) -> Tensor:
        assert work.client_lr is not None
        assert work.batches is not None
        total: Tensor | None = None
        number = self.batches.loaders.num_batches(work.client_id, merge_single=self.batches.merges)
        for parameter in work.parameters:
            parameter.grad = None
        for index, (batch, size) in enumerate(work.batches()):
            self.loop.clock.begin_batch(is_last=index + 1 == number)
            self.loop.expect(batch, size)
            with self.trainer.precision_plugin.train_step_context():
                loss = self.calls.training_loss(batch, index)
            if loss is None:
                raise ValueError(
                    f"training_step must return a loss for full gradients, found None at client {work.client_id}"
                )
            share = loss * (size / work.num_samples)
            torch.autograd.backward(share)
            total = share.detach() if total is None else total + share.detach()
        if total is None:
            raise ValueError(f"client {work.client_id} has no batch to train on ({work.num_samples} samples)")
        for parameter, view in zip(work.parameters, work.layout.views(out), strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                gradient = gradient.to_dense()
            view.zero_() if gradient is None else torch.mul(gradient, work.client_lr, out=view)
        return total


class ClientLosses:
    """Measures clients on their training data, without a trace in the module, its metrics or its logs.

    Without a ``batch_size`` forward passes have as many samples as in training, so that losses which depend on the
    batch (contrastive ones, sums) are those that clients train on.
    """

    def __init__(
        self, trainer: Trainer, calls: ModuleCalls, batches: ClientBatches, batch_size: int | None
    ) -> None:  # fmt: skip
        self._trainer, self._calls, self._batches, self._batch_size = trainer, calls, batches, batch_size
        self._differentiates = False
        self._loss: Callable[[Any, int], Any] = (
            getattr(trainer.lightning_module, "federated_loss", None) or calls.training_output
        )

    def measure(self, client: int, needs: Needs) -> dict[str, float]:
        """Sample-weighted means over the client's training data at the bound parameters, in eval mode."""
        module = self._trainer.lightning_module
        wanted: dict[str, Callable[[Any, int], Any]] = {}
        if needs.losses or needs.requery:
            wanted["loss"] = self._module_loss
        if needs.accuracies:
            wanted["accuracy"] = partial(self._asked, getattr(module, "federated_accuracy"))  # noqa: B009 (nn.Module's type)
        with self._calls.undone(), torch.no_grad():
            return self._means(client, wanted)

    def _means(self, client: int, wanted: Mapping[str, Callable[[Any, int], Any]]) -> dict[str, float]:
        precision = self._trainer.precision_plugin
        totals = dict.fromkeys(wanted, 0.0)
        counts = dict.fromkeys(wanted, 0)
        for index, (batch, number) in enumerate(self._batches.in_order(client, self._batch_size)):
            moved = self._calls.converted(batch)
            for name, function in wanted.items():
                with precision.val_step_context():
                    value = function(moved, index)
                if value is not None:
                    totals[name] += float(value) * number
                    counts[name] += number
        return {name: totals[name] / count if count else float("nan") for name, count in counts.items()}

    def _module_loss(self, batch: Any, index: int) -> Any:
        output = self._asked(self._loss, batch, index)
        return output.get("loss") if isinstance(output, Mapping) else output

    def _asked(self, function: Callable[[Any, int], Any], batch: Any, index: int) -> Any:
        if not self._differentiates:
            try:
                return function(batch, index)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                self._differentiates = True  # a gradient penalty, for instance: the loss is made of gradients
        with torch.enable_grad():
            return function(batch, index)
