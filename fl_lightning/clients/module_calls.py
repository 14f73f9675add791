# SPDX-License-Identifier: Apache-2.0
"""How batches reach the module, the losses that come back, and losses, accuracies and full gradients of clients."""

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
from fl_lightning.lightning.batches import loss_of, move_to_device
from fl_lightning.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.lightning.fast_log import TrainingLog
from fl_lightning.lightning.inspection import takes_batch_index, transfer_is_hooked
from fl_lightning.lightning.module.object_state import Undone
from fl_lightning.lightning.names import LightningModule, Trainer


class ModuleCalls:
    """Calls ``training_step`` as Lightning does."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.precision = trainer, trainer.precision_plugin
        self.module: LightningModule = trainer.lightning_module
        self.undone = Undone(self.module)  # runs it without a trace
        self.hooked = transfer_is_hooked(trainer)  # hooks see batches on their way to the device
        self._takes_index = takes_batch_index(self.module.training_step)
        self._stays = not self.hooked and trainer.strategy.root_device.type == "cpu"

    def to_device(self, batch: Any) -> Any:
        """The batch as the module takes it: after the transfer hooks, on the device."""
        return batch if self._stays else move_to_device(self._trainer, batch)

    def converted(self, batch: Any) -> Any:
        """The batch in the trainer's precision, on the device."""
        return self.to_device(self.precision.convert_input(batch))

    def training_output(self, batch: Any, index: int) -> Any:
        """What ``training_step`` returns."""
        return self.module.training_step(batch, index) if self._takes_index else self.module.training_step(batch)

    def training_loss(self, batch: Any, index: int) -> Tensor | None:
        """The loss of ``training_step``; ``None`` if it skips the batch."""
        output = self.training_output(batch, index)
        return output if isinstance(output, Tensor) else loss_of(output)

    def unlogged_loss(self, batch: Any, index: int) -> Tensor:
        """The module's loss of a batch as it is at the moment; nothing is logged and metrics stay as they are."""
        with self.undone(evaluate=False), self.precision.train_step_context():
            loss = loss_of(self.training_output(batch, index))
        if loss is None:
            raise ValueError("training_step must return a loss for every batch for this method, found None")
        return loss


@dataclass(frozen=True)
class FullGradients:
    """Uploads the gradient of all of a client's data, in place of local training (FedSGD)."""

    loop: FederatedEpochLoop
    calls: ModuleCalls
    batches: ClientBatches
    rule: ClientRule

    def step(self, work: LocalWork, log: TrainingLog, out: Tensor) -> Tensor:
        """Writes the learning rate times a client's full gradient to ``out`` (``[n]``); returns its mean loss."""
        if overrides(self.rule, "begin_client"):  # it looks at the client's data at the global parameters
            work.forward_context = self.calls.precision.val_step_context
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
            with self.calls.precision.train_step_context():
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

    def __init__(self, calls: ModuleCalls, batches: ClientBatches, batch_size: int | None) -> None:
        self._calls, self._batches, self._batch_size = calls, batches, batch_size
        self._differentiates = False
        self._loss: Callable[[Any, int], Any] = getattr(calls.module, "federated_loss", None) or calls.training_output

    def measure(self, client: int, needs: Needs) -> dict[str, float]:
        """Sample-weighted means over the client's training data at the bound parameters, in eval mode."""
        wanted: dict[str, Callable[[Any, int], Any]] = {}
        if needs.losses or needs.requery:
            wanted["loss"] = self._module_loss
        if needs.accuracies:
            accuracy = getattr(self._calls.module, "federated_accuracy")  # noqa: B009 (nn.Module's type)
            wanted["accuracy"] = partial(self._asked, accuracy)
        with self._calls.undone(), torch.no_grad():
            return self._means(client, wanted)

    def _means(self, client: int, wanted: Mapping[str, Callable[[Any, int], Any]]) -> dict[str, float]:
        precision = self._calls.precision
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
