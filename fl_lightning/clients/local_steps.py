# SPDX-License-Identifier: Apache-2.0
"""One local step in two ways, through Lightning's hooks or without them: loss, gradients, plain SGD."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fl_lightning.clients.client_hooks import ClientHooks
from fl_lightning.lightning.batches import loss_of, move_to_device
from fl_lightning.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.lightning.inspection import takes_batch_index, transfer_is_hooked
from fl_lightning.lightning.module.object_state import Undone
from fl_lightning.lightning.names import LightningModule, Trainer


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
        self._loop, self._gradients = loop, gradients
        self._calls, self._hooks, self._optimizer = eager.calls, eager.hooks, eager.optimizer

    def __call__(self, batch: Any, index: int, size: int) -> tuple[Tensor | None, bool]:
        """See :class:`LocalStep`."""
        batch = self._calls.to_device(batch)
        self._loop.expect(batch, size)
        self._hooks.begin_batch(batch)
        loss = self._gradients(batch, index)
        self._hooks.before_optimizer_step()
        self._calls.clip_gradients(self._optimizer.wrapped)
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


class ModuleCalls:
    """Calls ``training_step`` as Lightning does."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
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
        return self.to_device(self._trainer.precision_plugin.convert_input(batch))

    def training_output(self, batch: Any, index: int) -> Any:
        """What ``training_step`` returns."""
        return self.module.training_step(batch, index) if self._takes_index else self.module.training_step(batch)

    def training_loss(self, batch: Any, index: int) -> Tensor | None:
        """The loss of ``training_step``; ``None`` if it skips the batch."""
        output = self.training_output(batch, index)
        return output if isinstance(output, Tensor) else loss_of(output)

    def unlogged_loss(self, batch: Any, index: int) -> Tensor:
        """The module's loss of a batch as it is at the moment; nothing is logged and metrics stay as they are."""
        with self.undone(evaluate=False), self._trainer.precision_plugin.train_step_context():
            loss = loss_of(self.training_output(batch, index))
        if loss is None:
            raise ValueError("training_step must return a loss for every batch for this method, found None")
        return loss

    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Clips the gradients of an optimizer's parameters where ``Trainer(gradient_clip_val=...)`` asks for it."""
        if self._trainer.gradient_clip_val is not None:
            self.module.clip_gradients(optimizer)
