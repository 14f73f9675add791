# SPDX-License-Identifier: Apache-2.0
"""One local step, in two ways that give the same weights: through Lightning's optimization, or without its hooks."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.clients.client_hooks import ClientHooks
from fl_lightning.clients.fast_sgd import FastSGD
from fl_lightning.clients.loss_gradients import LossGradients
from fl_lightning.clients.module_calls import ModuleCalls
from fl_lightning.lightning.epoch_loop import FederatedEpochLoop


class LocalStep(Protocol):
    """Takes one step on a batch.

    Attributes:
        hook: the hook that ``self.log`` takes itself to be in during a visit; ``None``: Lightning says so for each.
    """

    hook: str | None

    def __call__(self, batch: Any, index: int, size: int) -> tuple[Tensor | None, bool]:
        """Takes the step, or gathers gradients for it: the loop's clock knows which.

        Returns:
            The detached loss (``None`` if the module gave none), and whether a hook asked the client to stop.
        """

    def begin_visit(self) -> None:
        """A client is about to train."""

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Steps with another optimizer from now on."""


class LightningStep:
    """Runs every hook that Lightning runs for a batch; the strategy calls the client's hooks in between."""

    hook: str | None = None

    def __init__(self, loop: FederatedEpochLoop) -> None:
        self._loop = loop

    def __call__(self, batch: Any, index: int, size: int) -> tuple[Tensor | None, bool]:
        """See :class:`LocalStep`."""
        return self._loop.local_step(batch, index, size)

    def begin_visit(self) -> None:
        """A client is about to train."""

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Lightning steps with the trainer's."""


class LeanStep:
    """Does the same arithmetic without the hooks, for fits in which nothing overrides them."""

    hook: str | None = "training_step"

    def __init__(
        self,
        loop: FederatedEpochLoop,
        calls: ModuleCalls,
        hooks: ClientHooks,
        optimizer: FastSGD,
        gradients: LossGradients,
    ) -> None:
        self._loop, self._calls, self._hooks = loop, calls, hooks
        self._optimizer, self._gradients = optimizer, gradients

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

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Steps with another optimizer from now on."""
        self._optimizer = FastSGD(optimizer)
        self._gradients.take_optimizer(self._optimizer)
