# SPDX-License-Identifier: Apache-2.0
"""A client's loss and accuracy at given parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fl_lightning.algorithms.base import Needs
from fl_lightning.core.lightning.names import Trainer
from fl_lightning.core.module_state import silenced
from fl_lightning.training.local_trainer import LocalTrainer


class ClientLosses:
    """Measures clients on their training data, without a trace in the module, its metrics or its logs.

    Args:
        trainer: the trainer.
        local: knows the clients' data and how the module takes a batch.
        batch_size: samples per forward pass; ``None``: as many as in training, so that losses which depend on the batch
            (contrastive ones, sums) are those that clients train on.
    """

    def __init__(self, trainer: Trainer, local: LocalTrainer, batch_size: int | None = None) -> None:
        self._trainer, self._local, self._batch_size = trainer, local, batch_size
        self._differentiates = False

    def measure(self, client: int, needs: Needs) -> dict[str, float]:
        """Sample-weighted means over the client's training data at the bound parameters, in eval mode.

        Args:
            client: the client.
            needs: which of ``"loss"`` and ``"accuracy"`` to return.
        """
        module = self._trainer.lightning_module
        wanted: dict[str, Callable[[Any, int], Any]] = {}
        if needs.losses or needs.requery:
            wanted["loss"] = getattr(module, "federated_loss", None) or self._local.training_output
        if needs.accuracies:
            wanted["accuracy"] = getattr(module, "federated_accuracy")  # noqa: B009 (nn.Module's type)
        with silenced(module), torch.no_grad():
            return self._means(client, wanted)

    def _means(self, client: int, wanted: Mapping[str, Callable[[Any, int], Any]]) -> dict[str, float]:
        precision, loaders = self._trainer.precision_plugin, self._local.loaders
        totals = {name: torch.zeros((), dtype=torch.float64) for name in wanted}
        counts = dict.fromkeys(wanted, 0)
        batches = loaders.batches(
            client, seed=None, merge_single=self._local.merge_single, batch_size=self._batch_size or loaders.batch_size
        )
        for index, (batch, number) in enumerate(batches):
            moved = self._local.to_device(precision.convert_input(batch))
            for name, function in wanted.items():
                with precision.val_step_context():
                    output = self._asked(function, moved, index)
                value = output.get("loss") if isinstance(output, Mapping) else output
                if value is not None:
                    totals[name] = totals[name] + torch.as_tensor(value).detach().cpu().double() * number
                    counts[name] += number
        return {name: float(totals[name] / count) if count else float("nan") for name, count in counts.items()}

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
