# SPDX-License-Identifier: Apache-2.0
"""A client's loss and accuracy at given parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fl_lightning._lightning import Trainer
from fl_lightning.algorithms.base import Needs
from fl_lightning.local import LocalTrainer
from fl_lightning.silence import silenced

_BATCH = 1024
"""Samples per forward pass; halved as often as memory demands."""


class ClientLosses:
    """Measures clients on their training data, without a trace in the module, its metrics or its logs.

    Args:
        trainer: the trainer.
        local: knows the clients' data and how the module takes a batch.
    """

    def __init__(self, trainer: Trainer, local: LocalTrainer) -> None:
        self._trainer, self._local = trainer, local
        self._batch = _BATCH

    @torch.no_grad()
    def measure(self, client: int, needs: Needs) -> dict[str, float]:
        """Sample-weighted means over the client's training data at the bound parameters, in eval mode.

        Batches are as large as memory allows.

        Args:
            client: the client.
            needs: which of ``"loss"`` and ``"accuracy"`` to return.
        """
        module, loaders = self._trainer.lightning_module, self._local.loaders
        wanted: dict[str, Callable[[Any, int], Any]] = {}
        if needs.losses or needs.requery:
            wanted["loss"] = getattr(module, "federated_loss", None) or self._local.training_output
        if needs.accuracies:
            wanted["accuracy"] = getattr(module, "federated_accuracy")  # noqa: B009 (nn.Module's type)
        with silenced(module):
            while True:
                try:
                    return self._means(client, wanted)
                except torch.OutOfMemoryError:  # noqa: PERF203
                    if self._batch <= loaders.batch_size:
                        raise
                    self._batch = max(self._batch // 2, loaders.batch_size)

    def _means(self, client: int, wanted: Mapping[str, Callable[[Any, int], Any]]) -> dict[str, float]:
        precision, loaders = self._trainer.precision_plugin, self._local.loaders
        totals = {name: torch.zeros((), dtype=torch.float64) for name in wanted}
        counts = dict.fromkeys(wanted, 0)
        size = max(self._batch, loaders.batch_size)
        for index, (batch, number) in enumerate(loaders.batches(client, seed=None, batch_size=size)):
            moved = self._local.to_device(precision.convert_input(batch))
            for name, function in wanted.items():
                with precision.val_step_context():
                    output = function(moved, index)
                value = output.get("loss") if isinstance(output, Mapping) else output
                if value is not None:
                    totals[name] = totals[name] + torch.as_tensor(value).detach().cpu().double() * number
                    counts[name] += number
        return {name: float(totals[name] / count) if count else float("nan") for name, count in counts.items()}
