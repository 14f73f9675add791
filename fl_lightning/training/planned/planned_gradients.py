# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients of local steps, from plans where they can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fl_lightning.core.lightning.training_output import loss_of
from fl_lightning.training.client_hooks import ClientHooks
from fl_lightning.training.fast_sgd import FastSGD
from fl_lightning.training.loss_gradients import EagerGradients
from fl_lightning.training.module_calls import ModuleCalls
from fl_lightning.training.planned.planned_calls import PlannedCalls


class PlannedGradients(PlannedCalls):
    """Takes the place of :class:`EagerGradients`, and calls it where there is no plan.

    Args:
        calls: how the module takes a batch.
        hooks: what the client rule does.
        eager: computes what is not planned.
        optimizer: takes the gradients.
        parameters: the bound parameters.
        patience: see :class:`PlannedCalls`.
    """

    def __init__(
        self,
        calls: ModuleCalls,
        hooks: ClientHooks,
        eager: EagerGradients,
        optimizer: FastSGD,
        parameters: Sequence[nn.Parameter],
        patience: int,
    ) -> None:
        fresh = hooks.keeps_gradients or not optimizer.lets_go
        given = (calls, hooks)
        super().__init__("Local steps", calls.module, _loss_of_batch, given, eager, parameters, patience, fresh)
        self._optimizer_of = eager.take_optimizer

    def take_optimizer(self, optimizer: FastSGD) -> None:
        """Gradients are for this optimizer from now on."""
        self._optimizer_of(optimizer)
        if not optimizer.lets_go and not self._fresh:
            self.give_up("the optimizer was replaced by one that may keep gradients")


def _loss_of_batch(batch: Any, index: int, records: list[Any], calls: ModuleCalls, hooks: ClientHooks) -> Tensor | None:
    records.clear()  # it is empty; TorchDynamo names a list by where it meets it first
    loss = loss_of(calls.training_output(batch, index))
    return loss if loss is None else hooks.add_loss_term(loss, batch)
