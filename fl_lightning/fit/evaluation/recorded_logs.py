# SPDX-License-Identifier: Apache-2.0
"""``self.log`` for one client alone: adds up what steps and hooks log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.lightning.module.logged_row import LoggedRow
from fl_lightning.lightning.module.undefined_metrics import Noticed

_KINDS: Mapping[Any, str] = {
    torch.mean: "mean", "avg": "mean", torch.sum: "sum", sum: "sum", torch.max: "max", max: "max", torch.min: "min",
    min: "min",
}  # fmt: skip


class RecordedLogs:
    """``self.log`` that adds up a client's values: means by samples, sums, largest, smallest, and metrics.

    Args:
        noticed: tells undefined values.
        loader: number of the loader that is being walked, which Lightning adds to names; ``None``: there is one.

    Attributes:
        size: gives how much the next values weigh, where the module does not say it.
    """

    def __init__(self, noticed: Noticed, loader: int | None = None) -> None:
        self.size: Callable[[], float] = _one
        self._noticed, self._loader = noticed, loader
        self._numbers: dict[str, tuple[str, list[Tensor], list[float]]] = {}
        self._undefined: dict[str, str] = {}
        self._metrics: dict[str, Metric] = {}
        self._computed: dict[int, tuple[Any, Metric, str | None]] = {}
        self._sources: dict[str, Metric] = {}

    def came_from(self, value: Any, metric: Metric, reason: str | None) -> None:
        """Remembers which metric has computed a value that may be logged later, and why it is undefined, if it is."""
        for item in value.values() if isinstance(value, dict) else (value,):
            self._computed[id(item)] = (item, metric, reason)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`."""
        if kwargs.get("on_epoch") is False:
            return
        if self._loader is not None and kwargs.get("add_dataloader_idx", True):
            name = f"{name}/dataloader_idx_{self._loader}"
        if isinstance(value, Metric):
            self._metrics[name] = value
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            reduction = kwargs.get("reduce_fx", "mean")
            kind = _KINDS.get(reduction, reduction)
            _, values, weights = self._numbers.setdefault(name, (str(kind), [], []))
            values.append(_number(value))
            weights.append(float(kwargs.get("batch_size") or self.size()))
            _, metric, reason = self._computed.get(id(value), (None, None, None))
            if metric is not None:
                self._sources[name] = metric
            # A function that has warned may have given this value or another one: none of them is to be trusted.
            reason = reason or next(iter(self._noticed.reasons), None)
            if reason is not None:
                self._undefined[name] = reason

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log_dict`."""
        for name, value in dictionary.items():
            self.log(name, value, **kwargs)

    def row(self) -> LoggedRow:
        """What was logged, one number per name."""
        row = LoggedRow()
        for name, (kind, values, weights) in self._numbers.items():
            if kind == "mean":
                total = sum((v * w for v, w in zip(values, weights, strict=True)), torch.zeros_like(values[0]))
                number = total / sum(weights)
            elif kind == "sum":
                number = sum(values, torch.zeros_like(values[0]))
            elif kind in ("max", "min"):
                number = max(values) if kind == "max" else min(values)
            else:
                continue
            row.add(name, float(number), self._undefined.get(name))
            row.note_direction(name, self._sources.get(name))
        for name, metric in self._metrics.items():
            computed, reason = self._noticed.computed(metric)
            reason = reason or self._computed.get(id(computed), (None, None, None))[2]
            if isinstance(computed, Tensor) and computed.numel() == 1:
                row.add(name, float(computed), reason)
                row.note_direction(name, metric)
        return row


def _number(value: Any) -> Tensor:
    """In the precision in which Lightning adds up."""
    number = torch.as_tensor(value).detach().clone().reshape(())  # a buffer of the module may change later
    return number if isinstance(value, Tensor) and value.is_floating_point() else number.to(torch.get_default_dtype())


def _one() -> float:
    return 1.0
