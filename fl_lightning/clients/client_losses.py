# SPDX-License-Identifier: Apache-2.0
"""A client's loss and accuracy at given parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from fl_lightning.algorithms.records import Needs
from fl_lightning.clients.client_batches import ClientBatches
from fl_lightning.clients.module_calls import ModuleCalls
from fl_lightning.lightning.names import Trainer


class ClientLosses:
    """Measures clients on their training data, without a trace in the module, its metrics or its logs.

    Args:
        trainer: the trainer.
        calls: how the module takes a batch.
        batches: the clients' batches.
        batch_size: samples per forward pass; ``None``: as many as in training, so that losses which depend on the batch
            (contrastive ones, sums) are those that clients train on.
    """

    def __init__(
        self,
        trainer: Trainer,
        calls: ModuleCalls,
        batches: ClientBatches,
        batch_size: int | None = None,
    ) -> None:
        self._trainer, self._calls, self._batches, self._batch_size = trainer, calls, batches, batch_size
        self._differentiates = False
        self._loss: Callable[[Any, int], Any] = (
            getattr(trainer.lightning_module, "federated_loss", None) or calls.training_output
        )

    def measure(self, client: int, needs: Needs) -> dict[str, float]:
        """Sample-weighted means over the client's training data at the bound parameters, in eval mode."""
        module = self._trainer.lightning_module
        wanted: dict[str, Callable[[Any, int], Any]] = {}
        if needs.losses or needs.requery:
            wanted["loss"] = self._module_loss
        if needs.accuracies:
            wanted["accuracy"] = partial(self._asked, getattr(module, "federated_accuracy"))  # noqa: B009 (nn.Module's type)
        with self._calls.undone(), torch.no_grad():
            return self._means(client, wanted)

    def _means(self, client: int, wanted: Mapping[str, Callable[[Any, int], Any]]) -> dict[str, float]:
        precision = self._trainer.precision_plugin
        totals = dict.fromkeys(wanted, 0.0)
        counts = dict.fromkeys(wanted, 0)
        for index, (batch, number) in enumerate(self._batches.in_order(client, self._batch_size)):
            moved = self._calls.converted(batch)
            for name, function in wanted.items():
                with precision.val_step_context():
                    value = function(moved, index)
                if value is not None:
                    totals[name] += float(value) * number
                    counts[name] += number
        return {name: totals[name] / count if count else float("nan") for name, count in counts.items()}

    def _module_loss(self, batch: Any, index: int) -> Any:
        output = self._asked(self._loss, batch, index)
        return output.get("loss") if isinstance(output, Mapping) else output

    def _asked(self, function: Callable[[Any, int], Any], batch: Any, index: int) -> Any:
        if not self._differentiates:
            try:
                return function(batch, index)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                self._differentiates = True  # a gradient penalty, for instance: the loss is made of gradients
        with torch.enable_grad():
            return function(batch, index)
