# SPDX-License-Identifier: Apache-2.0
"""Local training of one client on the bound module: a visit's steps, one step in two ways, or its full gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import ClientRule, overrides
from fl_lightning.algorithms.features import FeatureRecorder
from fl_lightning.algorithms.records import LocalWork
from fl_lightning.clients.client_batches import ClientBatches, ModuleCalls
from fl_lightning.core.tensors import foreach_mul_
from fl_lightning.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.lightning.fast_log import TrainingLog
from fl_lightning.lightning.fast_sgd import FastSGD


class ClientHooks:
    """Calls the client rule before a batch, on its loss, and before the optimizer steps.

    The lean path calls these itself; on Lightning's full path the strategy does, from the hooks that Lightning gives
    it. Without a client in training they change nothing.
    """

    def __init__(self, module: nn.Module, rule: ClientRule) -> None:
        self._rule = rule
        self._changes_loss = overrides(rule, "loss_term", "shape_loss")
        self._begins = overrides(rule, "begin_batch")
        self._corrects = overrides(rule, "correct_gradients")
        self.features = FeatureRecorder(module) if rule.needs.features else None  # installed while clients train
        self.work: LocalWork | None = None  # the client in training
        self.index = 0  # of the batch in its pass; Lightning hides it from a training_step that does not ask
        self.rate: Callable[[], float | None] | None = None  # where it may change within a visit

    def begin_batch(self, batch: Any) -> None:
        """Tells the client rule that the module is about to see a batch."""
        if self.work is None:
            return
        if self.features is not None:
            self.features.forget()
        if self.rate is not None:
            self.work.client_lr = self.rate()
        if self._begins:
            self._rule.begin_batch(self.work, batch, self.index)

    def add_loss_term(self, loss: Tensor, batch: Any) -> Tensor:
        """Shapes a batch's loss and adds the client rule's term to it."""
        if not self._changes_loss or self.work is None:
            return loss
        term = self._rule.loss_term(self.work, batch, self.index)
        loss = self._rule.shape_loss(self.work, loss)
        return loss if term is None else loss + term

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """On Lightning's full path: what ``training_step`` returns, with the client rule's term added to its loss."""
        self.begin_batch(args[0])
        output = step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            return output
        total = self.add_loss_term(loss, args[0])
        if total is loss:
            return output
        return {**output, "loss": total} if isinstance(output, Mapping) else total

    def corrected(self, closure: Callable[[], Any], precision: object) -> Callable[[], Any]:
        """On Lightning's full path: the optimizer's closure, after which the client rule corrects the gradients.

        Under a precision plugin that scales losses (``"16-mixed"``), gradients are scaled until the closure has
        returned.
        """
        scaler = getattr(precision, "scaler", None) if self._corrects else None

        def run() -> Any:
            result = closure()
            scale = 1.0 if scaler is None else float(scaler.get_scale())
            self._rescale(1 / scale)
            self.before_optimizer_step()
            self._rescale(scale)
            return result

        return run

    def _rescale(self, factor: float) -> None:
        gradients = [p.grad for p in self.work.parameters if p.grad is not None] if self.work and factor != 1 else []
        if gradients:
            foreach_mul_(gradients, factor)

    def before_optimizer_step(self) -> None:
        """Counts the step and lets the client rule correct the gradients."""
        if self.work is None:
            return
        if self.rate is not None:
            self.work.take_rate(self.rate())
        if self._corrects:
            for parameter in self.work.parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()  # corrections are nowhere zero
            self._rule.correct_gradients(self.work)
        self.work.steps += 1


class LocalTrainer:
    """Takes a client's local steps: through every hook that Lightning runs for a batch, or without them.

    Without hooks it does the same arithmetic. That is for fits in which nothing overrides them: ``optimizer`` is given
    there, and is ``None`` elsewhere. Where Lightning's hooks run, the strategy calls :class:`ClientHooks` in between.
    """

    def __init__(
        self,
        loop: FederatedEpochLoop,
        calls: ModuleCalls,
        batches: ClientBatches,
        rule: ClientRule,
        hooks: ClientHooks,
        optimizer: FastSGD | None,
    ) -> None:
        self._loop, self._clock, self._calls, self._batches = loop, loop.clock, calls, batches
        self._rule, self._hooks, self.optimizer = rule, hooks, optimizer
        self.log: TrainingLog = loop.fast_log()  # in place of the module's ``log``
        self._automatic = calls.module.automatic_optimization
        self._passed = self.skipped = 0  # of the visit: batches in earlier passes; without a loss, if automatic

    def train(self, work: LocalWork) -> Tensor | None:
        """Trains the client's parameters; the sample-weighted mean of the losses, if the module reported any."""
        hooks = self._hooks
        hooks.work = work
        work.forward_context, work.own_loss, self._passed = self._calls.precision.train_step_context, self._own_loss, 0
        self._rule.begin_client(work)
        self.log.install(None if self.optimizer is None else "training_step")
        if hooks.features is not None:
            hooks.features.install()
        losses: list[Tensor] = []
        sizes: list[int] = []
        done, clock, opens, self.skipped = 0, self._clock, True, 0
        step = self._loop.local_step if self.optimizer is None else partial(self._lean_step, self.optimizer)
        try:
            for batch, size, hooks.index, ends_pass, is_last in self._batches.in_training(work.client_id, work.round):
                place, self._passed = hooks.index % work.window, done - hooks.index
                opens = opens or place == 0
                clock.begin_batch(is_last, opens, ends_pass or place + 1 == work.window)
                # A collate_fn that finds no sample to use gives no batch, as in Lightning; then the next one opens.
                loss, stop = None, False
                if batch is not None:
                    loss, stop = step(batch, done, size)
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
            if hooks.features is not None:
                hooks.features.remove()
        if done == 0:
            raise ValueError(f"client {work.client_id} has no batch to train on ({work.num_samples} samples)")
        return _weighted_mean(losses, sizes) if losses else None

    def _lean_step(self, optimizer: FastSGD, batch: Any, index: int, size: int) -> tuple[Tensor | None, bool]:
        """Does what :meth:`FederatedEpochLoop.local_step` does, without hooks; no hook can ask the client to stop."""
        batch, loop, hooks = self._calls.to_device(batch), self._loop, self._hooks
        loop.expect(batch, size)
        hooks.begin_batch(batch)
        loss = self._calls.training_loss(batch, index)
        if loss is not None:
            loss = hooks.add_loss_term(loss, batch)
        optimizer.zero_grad()
        if loss is not None:
            torch.autograd.backward(loss)
            loss = loss.detach()
        hooks.before_optimizer_step()
        if loop.trainer.gradient_clip_val is not None:
            self._calls.module.clip_gradients(optimizer.wrapped)
        optimizer.step()
        loop.count_step()
        if self._clock.scheduled:
            self._clock.end_step()
        return loss, False

    def _own_loss(self, batch: Any, index: int) -> Tensor:
        """The module's loss of a batch of the present pass, under its place in the visit, as ``training_step`` is."""
        return self._calls.unlogged_loss(batch, index + self._passed)

    def full_gradient(self, work: LocalWork, out: Tensor) -> Tensor:
        """Trains nothing (FedSGD): writes the learning rate times a client's full gradient to ``out [n]``.

        Returns the mean loss.
        """
        if overrides(self._rule, "begin_client"):  # it looks at the client's data at the global parameters
            work.forward_context = self._calls.precision.val_step_context
            with self._calls.unseen():
                self._rule.begin_client(work)
        self.log.install("training_step")
        try:
            loss = self._gradient(work, out)
        finally:
            self.log.remove()
        self._loop.count_step()  # a round has one, though no optimizer takes it
        work.steps += 1
        return loss

    def _gradient(self, work: LocalWork, out: Tensor) -> Tensor:
        assert work.client_lr is not None
        assert work.batches is not None
        total: Tensor | None = None
        number = self._batches.loaders.num_batches(work.client_id, merge_single=self._batches.merges)
        for parameter in work.parameters:
            parameter.grad = None
        for index, (batch, size) in enumerate(work.batches()):
            self._clock.begin_batch(is_last=index + 1 == number)
            self._loop.expect(batch, size)
            with self._calls.precision.train_step_context():
                loss = self._calls.training_loss(batch, index)
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
