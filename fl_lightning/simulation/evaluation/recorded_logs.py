# SPDX-License-Identifier: Apache-2.0
"""``self.log`` for one client alone: adds up what an evaluation step logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

_KINDS: Mapping[Any, str] = {torch.mean: "mean", "avg": "mean", torch.sum: "sum", torch.max: "max", torch.min: "min"}


class RecordedLogs:
    """``self.log`` that adds up a client's values: means by samples, sums, largest, smallest, and metrics.

    Attributes:
        size: how much the next values weigh, where the module does not say it.
    """

    def __init__(self) -> None:
        self.size = 0
        self._numbers: dict[str, tuple[str, list[float], list[float]]] = {}
        self._metrics: dict[str, Metric] = {}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`."""
        if kwargs.get("on_epoch") is False:
            return
        if isinstance(value, Metric):
            self._metrics[name] = value
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            reduction = kwargs.get("reduce_fx", "mean")
            kind = _KINDS.get(reduction, reduction)
            _, values, weights = self._numbers.setdefault(name, (str(kind), [], []))
            values.append(float(value))
            weights.append(float(kwargs.get("batch_size") or self.size))

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log_dict`."""
        for name, value in dictionary.items():
            self.log(name, value, **kwargs)

    def values(self) -> dict[str, float]:
        """What was logged, one number per name."""
        reduced = {}
        for name, (kind, values, weights) in self._numbers.items():
            if kind == "mean":
                reduced[name] = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
            elif kind == "sum":
                reduced[name] = sum(values)
            elif kind in ("max", "min"):
                reduced[name] = max(values) if kind == "max" else min(values)
        for name, metric in self._metrics.items():
            computed = metric.compute()
            if isinstance(computed, Tensor) and computed.numel() == 1:
                reduced[name] = float(computed)
        return reduced
