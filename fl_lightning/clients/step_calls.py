# SPDX-License-Identifier: Apache-2.0
"""What local steps call: the module, as Lightning would, and the client rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fl_lightning.algorithms.base import ClientRule, overrides
from fl_lightning.algorithms.features import FeatureRecorder
from fl_lightning.algorithms.records import LocalWork
from fl_lightning.clients.module_isolation import ModuleIsolation
from fl_lightning.core.tensors import foreach_mul_
from fl_lightning.lightning.batches import loss_of, move_to_device
from fl_lightning.lightning.inspection import takes_batch_index, transfer_is_hooked
from fl_lightning.lightning.names import LightningModule, Trainer


class ModuleCalls:
    """Calls ``training_step`` as Lightning does."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.precision = trainer, trainer.precision_plugin
        self.module: LightningModule = trainer.lightning_module
        self.unseen = ModuleIsolation(self.module).unseen  # runs it without a trace
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
        with self.unseen(evaluate=False), self.precision.train_step_context():
            loss = loss_of(self.training_output(batch, index))
        if loss is None:
            raise ValueError("training_step must return a loss for every batch for this method, found None")
        return loss


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
