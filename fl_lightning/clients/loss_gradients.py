# SPDX-License-Identifier: Apache-2.0
"""The loss of a batch and its gradients."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from fl_lightning.clients.client_hooks import ClientHooks
from fl_lightning.clients.fast_sgd import FastSGD
from fl_lightning.clients.module_calls import ModuleCalls


class LossGradients(Protocol):
    """Computes a batch's loss and leaves its gradients in the parameters."""

    def __call__(self, batch: Any, index: int) -> Tensor | None:
        """Computes them.

        Returns:
            The detached loss with the client rule's term; ``None`` if the module skips the batch.
        """

    def begin_visit(self) -> None:
        """A client is about to train."""

    def take_optimizer(self, optimizer: FastSGD) -> None:
        """Gradients are for this optimizer from now on."""


class EagerGradients:
    """Computes them as a loop written by hand does: ``training_step``, ``zero_grad``, ``backward``.

    Attributes:
        calls: as given.
        hooks: as given.
        optimizer: as given.
    """

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

    def begin_visit(self) -> None:
        """A client is about to train."""

    def take_optimizer(self, optimizer: FastSGD) -> None:
        """Gradients are for this optimizer from now on."""
        self.optimizer = optimizer
