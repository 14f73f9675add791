# SPDX-License-Identifier: Apache-2.0
"""Loss and accuracy of a client's data at the global parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf, nan
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.records import Needs
from fl_lightning.clients.client_batches import ClientBatches
from fl_lightning.clients.step_calls import ModuleCalls
from fl_lightning.lightning.batches import nbytes_of

MAX_FACTOR = 8
"""A forward pass without gradients over so many training batches needs about as much memory as one in training."""
_BYTES = 2**22
_BYTES_ON_CPU = 2**19
"""Of the input of a pass. Where one is larger, arithmetic takes the time, and nothing is gained."""
_ROUNDING = 1e-5
"""The same means differ by less, relative to the values of single batches."""
_SPREAD = 1e-3
"""Values of batches that differ by less cannot tell what their mean is weighted by."""


@dataclass
class _Mean:
    """Of values of batches, weighted by samples; the smallest and the largest of them."""

    total: float = 0.0
    count: int = 0
    low: float = inf
    high: float = -inf

    def add(self, value: float, number: int) -> None:
        self.total += value * number
        self.count += number
        self.low, self.high = min(self.low, value), max(self.high, value)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else nan

    @property
    def scale(self) -> float:
        return max(abs(self.low), abs(self.high))


class ClientLosses:
    """Measures clients on their training data, without a trace in the module, its metrics or its logs.

    A forward pass has ``batch_size`` samples; ``"training"``: as many as in training, so that losses which depend on
    the batch (contrastive ones, sums) are those that clients train on; ``None``: ``factor`` times as many. As long as
    there is no factor, batches are as in training, and clients may look for one.
    """

    def __init__(
        self, calls: ModuleCalls, batches: ClientBatches, batch_size: int | Literal["training"] | None
    ) -> None:  # fmt: skip
        self._calls, self._batches = calls, batches
        self._batch_size = batch_size if isinstance(batch_size, int) else None
        self._is_fixed = batch_size is not None
        self.factor: int | None = None
        self._differentiates = False
        self._loss: Callable[[Any, int], Any] = getattr(calls.module, "federated_loss", None) or calls.training_output

    def measure(
        self, client: int, needs: Needs, preserved: Callable[[], AbstractContextManager[None]], looks: bool = False
    ) -> tuple[dict[str, float], int | None]:
        """Sample-weighted means over the client's training data at the bound parameters, in eval mode.

        ``preserved`` brings random numbers and buffers back. Beside the means stands the factor that a client which
        ``looks`` has found to give them, too: 1 if no larger one does, ``None`` if it cannot tell or has not looked.
        """
        means, nbytes = self._pass(client, needs, preserved, self.factor or 1)
        found = {name: mean.value for name, mean in means.items()}
        largest = (_BYTES_ON_CPU if self._calls.module.device.type == "cpu" else _BYTES) // max(nbytes, 1)
        tells = all(mean.high - mean.low > _SPREAD * mean.scale for mean in means.values())
        if not looks or self._is_fixed or self.factor is not None or largest < 2 or not tells:
            return found, None
        factor = min(largest, MAX_FACTOR)
        try:
            joined, _ = self._pass(client, needs, preserved, factor)
        except Exception:  # no memory for so much, or a module that knows how long its batches are
            return found, 1
        same = all(abs(joined[name].value - mean.value) <= _ROUNDING * mean.scale for name, mean in means.items())
        return found, factor if same else 1

    def _pass(
        self, client: int, needs: Needs, preserved: Callable[[], AbstractContextManager[None]], factor: int
    ) -> tuple[dict[str, _Mean], int]:
        """The means, and the bytes of the first batch."""
        wanted: dict[str, Callable[[Any, int], Any]] = {}
        if needs.losses or needs.requery:
            wanted["loss"] = self._module_loss
        if needs.accuracies:
            accuracy = getattr(self._calls.module, "federated_accuracy")  # noqa: B009 (nn.Module's type)
            wanted["accuracy"] = accuracy
        try:
            with preserved(), self._calls.unseen(), torch.set_grad_enabled(self._differentiates):
                return self._means(client, wanted, factor)
        except RuntimeError as error:
            if self._differentiates or "does not require grad" not in str(error):
                raise
        self._differentiates = True  # a gradient penalty, for instance: the loss is made of gradients
        return self._pass(client, needs, preserved, factor)

    def _means(
        self, client: int, wanted: Mapping[str, Callable[[Any, int], Any]], factor: int
    ) -> tuple[dict[str, _Mean], int]:
        precision = self._calls.precision
        means, nbytes = {name: _Mean() for name in wanted}, 0
        size = self._batch_size or factor * self._batches.loaders.batch_size
        for index, (batch, number) in enumerate(self._batches.in_order(client, size)):
            nbytes = nbytes or nbytes_of(batch)
            moved = self._calls.converted(batch)
            for name, function in wanted.items():
                with precision.val_step_context():
                    value = function(moved, index)
                if value is not None:
                    means[name].add(float(value.detach() if isinstance(value, Tensor) else value), number)
        return means, nbytes

    def _module_loss(self, batch: Any, index: int) -> Any:
        output = self._loss(batch, index)
        return output.get("loss") if isinstance(output, Mapping) else output
