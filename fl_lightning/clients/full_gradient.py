# SPDX-License-Identifier: Apache-2.0
"""The gradient of all of a client's data, uploaded in place of local training (FedSGD)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule, overrides
from fl_lightning.algorithms.records import LocalWork
from fl_lightning.clients.client_batches import ClientBatches
from fl_lightning.clients.module_calls import ModuleCalls
from fl_lightning.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.lightning.fast_log import TrainingLog
from fl_lightning.lightning.names import Trainer


@dataclass(frozen=True)
class FullGradients:
    """Takes one step with all of a client's data at once."""

    trainer: Trainer
    loop: FederatedEpochLoop
    calls: ModuleCalls
    batches: ClientBatches
    rule: ClientRule

    def step(self, work: LocalWork, log: TrainingLog, out: Tensor) -> Tensor:
        """Computes the learning rate times the full gradient of a client, bound to the global parameters.

        Args:
            work: the client; its learning rate is known.
            log: takes what the module logs.
            out: contiguous ``[n]``, takes the result.

        Returns:
            The sample-weighted mean training loss.

        Raises:
            ValueError: the module skips a batch, or there is none.
        """
        if overrides(self.rule, "begin_client"):  # it looks at the client's data at the global parameters
            work.forward_context = self.trainer.precision_plugin.val_step_context
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
            with self.trainer.precision_plugin.train_step_context():
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
