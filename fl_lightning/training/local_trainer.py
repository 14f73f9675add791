# SPDX-License-Identifier: Apache-2.0
"""Local training of one client.

The full path runs Lightning's own optimization with every hook. The lean path does the same arithmetic without the
hooks; it is taken when nothing overrides them. Both give identical weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.algorithms.base import ClientRule, LocalWork, changes_loss
from fl_lightning.algorithms.features import FeatureRecorder
from fl_lightning.core.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.core.lightning.fast_log import FastLog
from fl_lightning.core.lightning.names import TRANSFER_HOOKS, LightningModule, Trainer, lightning_module
from fl_lightning.core.lightning.training_output import loss_of
from fl_lightning.core.module_state import silenced
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.training.fast_sgd import FastSGD
from fl_lightning.training.local_plan import LocalPlan

if TYPE_CHECKING:
    from fl_lightning.core.lightning.fast_log import LogCall


class TrainingLog(Protocol):
    """Takes the place of the module's ``log`` while it is installed."""

    def install(self) -> None:
        """Shadows the module's ``log``."""

    def remove(self) -> None:
        """Gives the module its own ``log`` back."""

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`."""


class LocalTrainer:
    """Trains clients one after the other on the bound module.

    Args:
        loop: the epoch loop, for Lightning's optimization and logging.
        loaders: the clients' training data.
        plan: how long clients train.
        rule: the client half of the method.
        lean: take the lean path.

    Attributes:
        loaders: the clients' training data.
        merge_single: a last batch of one sample joins the one before.
        hooked: hooks of the module or the data module see batches on their way to the device.
    """

    def __init__(
        self, loop: FederatedEpochLoop, loaders: ClientLoaders, plan: LocalPlan, rule: ClientRule, lean: bool
    ) -> None:
        self._loop, self.loaders, self._plan, self._rule, self._lean = loop, loaders, plan, rule, lean
        self._trainer: Trainer = loop.trainer
        self._module: LightningModule = loop.trainer.lightning_module
        helpers = lightning_module("utilities.model_helpers")
        takes_index = lightning_module("utilities.signature_utils").is_param_in_hook_signature
        self._takes_index = takes_index(self._module.training_step, "batch_idx", min_args=2)
        self._has_term = changes_loss(rule)
        self._begins = type(rule).begin_batch is not ClientRule.begin_batch
        self._corrects = type(rule).correct_gradients is not ClientRule.correct_gradients
        self._tap = FeatureRecorder(self._module) if rule.needs.features else None
        self.merge_single = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self._module.modules())
        owners = [owner for owner in (self._module, self._trainer.datamodule) if owner is not None]
        self.hooked = any(helpers.is_overridden(name, owner) for owner in owners for name in TRANSFER_HOOKS)
        self._stays = not self.hooked and self._trainer.strategy.root_device.type == "cpu"
        self.take_optimizer(self._trainer.optimizers[0])
        self._log: TrainingLog = FastLog(self._module, loop._results)
        self.work: LocalWork | None = None
        self._index = 0  # place of the present batch; Lightning hides it from a training_step that does not ask

    # ---- local training

    def train(self, work: LocalWork) -> Tensor | None:
        """Runs local training on the parameters bound to ``work.row``.

        Returns:
            The sample-weighted mean of the training losses, or ``None`` if the module reported none.
        """
        self.work = work
        work.forward_context, work.own_loss = self._trainer.precision_plugin.train_step_context, self.own_loss
        self._rule.begin_client(work)
        self._log.install()
        if self._tap is not None:
            self._tap.install()
        losses: list[Tensor] = []
        sizes: list[int] = []
        done = 0
        try:
            for batch, size, index, is_last in self._schedule(work):
                loss, stop = self._step(batch, index, size, is_last)
                done += 1
                if loss is not None:
                    losses.append(loss.reshape(()) if loss.dim() else loss)
                    sizes.append(size)
                if stop:
                    break
        finally:
            self._log.remove()
            if self._tap is not None:
                self._tap.remove()
        if done == 0:
            raise ValueError(f"client {work.client_id} has no batch to train on ({work.num_samples} samples)")
        return _weighted_mean(losses, sizes) if losses else None

    def _schedule(self, work: LocalWork) -> Iterator[tuple[Any, int, int, bool]]:
        for seed, take in self.passes(work.client_id, work.round):
            batches = self.loaders.batches(work.client_id, seed=seed, merge_single=self.merge_single)
            for index, (batch, size) in enumerate(islice(batches, take)):
                yield batch, size, index, index + 1 == take

    def passes(self, client: int, round: int) -> Iterator[tuple[int, int]]:  # noqa: A002
        """Passes over a client's data in local training: the seed of each one's order, and its number of batches."""
        plan, window = self._plan, self._trainer.accumulate_grad_batches
        per_pass = plan.batches(self.loaders.num_batches(client, merge_single=self.merge_single))
        wanted, number = plan.steps, 0
        while per_pass > 0 and (number < plan.epochs if wanted is None else wanted > 0):
            take = per_pass if wanted is None else min(per_pass, wanted * window)
            yield derive_seed(plan.seed, "shuffle", round, client, number), take
            if wanted is not None:
                wanted -= ceil(take / window)  # a pass ends with a step
            number += 1

    def planned_steps(self, client: int) -> int:
        """Optimizer steps that a client is going to take, if the module optimizes automatically and to the end."""
        window = self._trainer.accumulate_grad_batches
        return sum(ceil(take / window) for _, take in self.passes(client, 0))

    def _step(self, batch: Any, index: int, size: int, is_last: bool) -> tuple[Tensor | None, bool]:
        self._index = index
        if not self._lean:
            return self._loop.local_step(batch, index, size, is_last)
        batch = self.to_device(batch)
        self._loop.expect(batch, size)
        self.begin_batch(batch)
        loss = self._forward(batch, index)
        self._optimizer.zero_grad()
        if loss is not None:
            torch.autograd.backward(loss)
        self.before_optimizer_step()
        self._optimizer.step()
        self._loop.count_step()
        return (None if loss is None else loss.detach()), False

    def _forward(self, batch: Any, index: int) -> Tensor | None:
        attributes = vars(self._module)  # nn.Module's own way of setting one takes as long as a small operation
        attributes["_current_fx_name"] = "training_step"
        try:
            loss = loss_of(self.training_output(batch, index))
        finally:
            attributes["_current_fx_name"] = None
        return None if loss is None else self.add_loss_term(loss, batch)

    def begin_batch(self, batch: Any) -> None:
        """Tells the client rule that the module is about to see a batch."""
        if self.work is None:
            return
        if self._tap is not None:
            self._tap.forget()
        if self._begins:
            self._rule.begin_batch(self.work, batch, self._index)

    def add_loss_term(self, loss: Tensor, batch: Any) -> Tensor:
        """Weighs a batch's loss and adds the client rule's term to it."""
        if not self._has_term or self.work is None:
            return loss
        term = self._rule.loss_term(self.work, batch, self._index)
        weight = self._rule.loss_weight(self.work)
        loss = loss if weight == 1 else weight * loss
        return loss if term is None else loss + term

    def own_loss(self, batch: Any, index: int) -> Tensor:
        """The module's loss of a batch as it is at the moment; nothing is logged and metrics stay as they are."""
        with silenced(self._module, evaluate=False), self._trainer.precision_plugin.train_step_context():
            loss = loss_of(self.training_output(batch, index))
        if loss is None:
            raise ValueError("training_step must return a loss for every batch for this method, found None")
        return loss

    def before_optimizer_step(self) -> None:
        """Counts the step and lets the client rule correct the gradients."""
        if self.work is None:
            return
        if self._corrects:
            for parameter in self.work.parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()  # corrections are nowhere zero
            self._rule.correct_gradients(self.work)
        self.work.steps += 1

    def training_output(self, batch: Any, index: int) -> Any:
        """What the module's ``training_step`` returns."""
        module = self._module
        return module.training_step(batch, index) if self._takes_index else module.training_step(batch)

    def to_device(self, batch: Any) -> Any:
        """The batch as the module takes it: after the transfer hooks, on the device."""
        if self._stays:
            return batch
        return self._trainer.strategy.batch_to_device(self._module._on_before_batch_transfer(batch))

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Lets the lean path step with another optimizer."""
        self._optimizer = FastSGD(optimizer)

    def take_log(self, log: TrainingLog) -> None:
        """Lets ``self.log`` in local training go elsewhere."""
        self._log = log

    def log(self, calls: Iterable[LogCall]) -> None:
        """Logs what local training elsewhere has logged."""
        module = self._module
        try:
            for call in calls:
                self._loop.expect(None, call.size)
                module._current_fx_name = call.fx
                self._log(call.name, call.value, *call.args, **call.kwargs)
        finally:
            module._current_fx_name = None

    # ---- full-gradient upload

    def data(self, client: int) -> Iterator[tuple[Any, int]]:
        """One pass over the client's training data, on the device and in the dataset's order."""
        # A batch size of one's own choosing: drop_last does not apply to it.
        size = self.loaders.batch_size
        for batch, number in self.loaders.batches(client, seed=None, batch_size=size, merge_single=self.merge_single):
            yield self.to_device(self._trainer.precision_plugin.convert_input(batch)), number

    def at_global(self, work: LocalWork) -> None:
        """Lets the client rule look at the client's data at the global parameters, in eval mode."""
        if type(self._rule).begin_client is not ClientRule.begin_client:
            work.forward_context = self._trainer.precision_plugin.val_step_context
            with silenced(self._module):
                self._rule.begin_client(work)

    def full_gradient(self, work: LocalWork) -> Tensor:
        """Leaves the full-batch gradient at the bound parameters in ``parameter.grad``.

        Returns:
            The sample-weighted mean training loss.
        """
        client, total = work.client_id, None
        samples = int(self.loaders.sizes[client])
        for parameter in work.parameters:
            parameter.grad = None
        self._log.install()
        try:
            for index, (batch, size) in enumerate(self.data(client)):
                self._loop.expect(batch, size)
                with self._trainer.precision_plugin.train_step_context():
                    loss = self._forward(batch, index)
                if loss is None:
                    raise ValueError(
                        f"training_step must return a loss for full gradients, found None at client {client}"
                    )
                share = loss * (size / samples)
                torch.autograd.backward(share)
                total = share.detach() if total is None else total + share.detach()
        finally:
            self._log.remove()
        if total is None:
            raise ValueError(f"client {client} has no batch to train on ({work.num_samples} samples)")
        self._loop.count_step()
        work.steps += 1
        return total


def _weighted_mean(losses: list[Tensor], sizes: list[int]) -> Tensor:
    # Once per client: adding up after every step would cost two more operations in each.
    wide = torch.stack(losses)
    # Half precision has no room for a sum over a client's samples.
    wide = wide if wide.dtype.itemsize > 2 else wide.float()
    if wide.device.type == "cpu":
        total = sum(loss * size for loss, size in zip(wide.tolist(), sizes, strict=True))
        return torch.tensor(total / sum(sizes), dtype=wide.dtype)
    return (wide * torch.tensor(sizes, dtype=wide.dtype, device=wide.device)).sum() / sum(sizes)
