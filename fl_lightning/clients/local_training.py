# SPDX-License-Identifier: Apache-2.0
"""Local training of one client on the bound module: a visit's steps, one step in two ways, its loss and gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.records import LocalWork
from fl_lightning.clients.client_batches import ClientBatches
from fl_lightning.clients.client_hooks import ClientHooks
from fl_lightning.clients.module_calls import ModuleCalls
from fl_lightning.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.lightning.fast_log import TrainingLog


class LocalTrainer:
    """Takes a client's local steps."""

    def __init__(
        self,
        loop: FederatedEpochLoop,
        calls: ModuleCalls,
        batches: ClientBatches,
        rule: ClientRule,
        hooks: ClientHooks,
        step: LocalStep,
    ) -> None:
        self._clock, self._calls, self._batches = loop.clock, calls, batches
        self._rule, self._hooks, self._step = rule, hooks, step
        self.log: TrainingLog = loop.fast_log()  # in place of the module's ``log``
        self._automatic = calls.module.automatic_optimization
        self._passed = self.skipped = 0  # of the visit: batches in earlier passes; without a loss, if automatic

    def train(self, work: LocalWork) -> Tensor | None:
        """Trains the client's parameters; the sample-weighted mean of the losses, if the module reported any."""
        hooks = self._hooks
        hooks.work = work
        work.forward_context, work.own_loss, self._passed = self._calls.precision.train_step_context, self._own_loss, 0
        self._rule.begin_client(work)
        self.log.install(self._step.hook)
        if hooks.features is not None:
            hooks.features.install()
        self._step.begin_visit()
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
                    loss, stop = self._step(batch, done, size)
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


class LocalStep(ABC):
    """Takes one step on a batch."""

    hook: str | None  # in which ``self.log`` takes itself to be in a visit; ``None``: Lightning says so for each

    @abstractmethod
    def __call__(self, batch: Any, index: int, size: int) -> tuple[Tensor | None, bool]:
        """Takes the step, or gathers gradients for it: the loop's clock knows which.

        Returns the detached loss, if the module gave one, and whether a hook asked the client to stop.
        """

    def begin_visit(self) -> None:
        """A client is about to train."""


class LightningStep(LocalStep):
    """Runs every hook that Lightning runs for a batch; the strategy calls the client's hooks in between."""

    hook: str | None = None

    def __init__(self, loop: FederatedEpochLoop) -> None:
        self._loop = loop

    def __call__(self, batch: Any, index: int, size: int) -> tuple[Tensor | None, bool]:
        """See :class:`LocalStep`."""
        return self._loop.local_step(batch, index, size)


class LeanStep(LocalStep):
    """Does the same arithmetic without the hooks, for fits in which nothing overrides them."""

    hook: str | None = "training_step"

    def __init__(self, loop: FederatedEpochLoop, eager: EagerGradients, gradients: LossGradients) -> None:
        self._trainer, self._loop, self._gradients = loop.trainer, loop, gradients
        self._calls, self._hooks, self._optimizer = eager.calls, eager.hooks, eager.optimizer

    def __call__(self, batch: Any, index: int, size: int) -> tuple[Tensor | None, bool]:
        """See :class:`LocalStep`."""
        batch = self._calls.to_device(batch)
        self._loop.expect(batch, size)
        self._hooks.begin_batch(batch)
        loss = self._gradients(batch, index)
        self._hooks.before_optimizer_step()
        if self._trainer.gradient_clip_val is not None:
            self._calls.module.clip_gradients(self._optimizer.wrapped)
        self._optimizer.step()
        self._loop.count_step()
        if self._loop.clock.scheduled:
            self._loop.clock.end_step()
        return loss, False

    def begin_visit(self) -> None:
        """A client is about to train."""
        self._gradients.begin_visit()


class LossGradients(ABC):
    """Computes a batch's loss and leaves its gradients in the parameters."""

    @abstractmethod
    def __call__(self, batch: Any, index: int) -> Tensor | None:
        """The detached loss with the client rule's term; ``None`` if the module skips the batch."""

    def begin_visit(self) -> None:
        """A client is about to train."""


class EagerGradients(LossGradients):
    """Computes them as a loop written by hand does: ``training_step``, ``zero_grad``, ``backward``."""

    def __init__(self, calls: ModuleCalls, hooks: ClientHooks, optimizer: FastSGD) -> None:
        self.calls, self.hooks, self.optimizer = calls, hooks, optimizer

    def __call__(self, batch: Any, index: int) -> Tensor | None:
        """See :class:`LossGradients`."""
        return self.differentiate(self.loss(batch, index))

    def loss(self, batch: Any, index: int) -> Tensor | None:
        """The module's loss of a batch with the client rule's term."""
        loss = self.calls.training_loss(batch, index)
        return loss if loss is None else self.hooks.add_loss_term(loss, batch)

    def differentiate(self, loss: Tensor | None) -> Tensor | None:
        """Leaves the gradients of a loss in the parameters; ``None`` leaves no gradients there."""
        self.optimizer.zero_grad()
        if loss is None:
            return None
        torch.autograd.backward(loss)
        return loss.detach()


class FastSGD:
    """Stands in for an optimizer whose next step is plain SGD, and calls the optimizer itself otherwise.

    Most federated clients run ``torch.optim.SGD`` without momentum on small models. There ``zero_grad`` and ``step``
    spend several times as long on hooks, profiler records and argument checks as on arithmetic, once per local batch.
    The arithmetic here is the same, operation by operation, so the weights have the same bits. Each step decides anew,
    because schedulers, callbacks and the module may change options of groups at any time.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.follow(optimizer)

    def follow(self, optimizer: Optimizer) -> None:
        """Stands in for another optimizer from now on."""
        self.wrapped = optimizer
        self._eligible = type(optimizer) is SGD

    @property
    def lets_go(self) -> bool:
        """Whether no step keeps a gradient beyond itself, so that the next one may be in the same memory."""
        return type(self.wrapped).__module__.startswith("torch.optim.") and _unobserved(self.wrapped)

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        if not self._eligible or "zero_grad" in vars(self.wrapped):
            self.wrapped.zero_grad()
            return
        for group in self.wrapped.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self) -> None:
        """Takes one step along the gradients that are there."""
        optimizer = self.wrapped
        groups = optimizer.param_groups
        if not self._eligible or not _unobserved(optimizer) or not all(map(_plain, groups)):
            optimizer.step()
            return
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # torch.no_grad() takes as long as the step of a small layer
        try:
            for group in groups:
                params, grads = group["params"], [g for p in group["params"] if (g := p.grad) is not None]
                if len(grads) < len(params):
                    params = [parameter for parameter in params if parameter.grad is not None]
                if not params:
                    continue
                if group["weight_decay"] != 0:
                    grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
                torch._foreach_add_(params, grads, alpha=-group["lr"])
        finally:
            torch._C._set_grad_enabled(enabled)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn if no step came before theirs


def _plain(group: dict[str, Any]) -> bool:
    return (
        group["momentum"] == 0
        and not group["maximize"]
        and not group["differentiable"]
        and not group["fused"]
        and type(group["lr"]) is float
    )


def _unobserved(optimizer: Optimizer) -> bool:
    """Whether no hook runs at steps and ``step`` is torch's own, perhaps wrapped by a scheduler."""
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    own = vars(optimizer).get("step")
    return own is None or getattr(own, "__wrapped__", None) is type(optimizer).step
