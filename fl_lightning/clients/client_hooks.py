# SPDX-License-Identifier: Apache-2.0
"""What the client rule does inside local steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import ClientRule, overrides
from fl_lightning.algorithms.features import FeatureRecorder
from fl_lightning.algorithms.records import LocalWork


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
        # The rule sees gradients, and may keep them beyond a step for all that is known.
        self.keeps_gradients = self._corrects and not type(rule).__module__.startswith("fl_lightning.")
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
            torch._foreach_mul_(gradients, factor)

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
