# SPDX-License-Identifier: Apache-2.0
"""Stand in for what belongs to the fit itself while a copy of it trains clients, and note its use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from fl_lightning.core.lightning.fast_log import LogCall, LoggedMetric, TrainingLog, current_hook
from fl_lightning.core.lightning.names import LightningModule
from fl_lightning.core.modules import submodules


class LogRecorder(TrainingLog):
    """Stands in for the module's ``log`` and keeps its calls for the fit itself."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__(module)
        self.calls: list[LogCall] = []
        self.metric = ""
        self._names = {id(part): name for name, part in submodules(module) if isinstance(part, Metric)}

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`."""
        if isinstance(value, Metric):
            if id(value) not in self._names:
                self.metric = f"logs the metric object {name!r}, which it did not have when the round began"
                return
            value = LoggedMetric(self._names[id(value)], value._forward_cache)
        value = value.detach().clone() if isinstance(value, Tensor) else value
        size = self._module.trainer.fit_loop.epoch_loop.batch_size
        self.calls.append(LogCall(current_hook(self._module), size, name, value, args, kwargs))


class WatchedMetrics(dict[str, Any]):
    """The trainer's metrics. Their copy is out of date, so reads are recorded."""

    touched = False

    def _touch(self, name: str) -> Any:
        self.touched = True
        return getattr(super(), name)

    def __getitem__(self, key: str) -> Any:
        return self._touch("__getitem__")(key)

    def __contains__(self, key: object) -> bool:
        return bool(self._touch("__contains__")(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self._touch("__iter__")())

    def get(self, *args: Any) -> Any:
        """As ever, noted."""
        return self._touch("get")(*args)

    def items(self) -> Any:
        """As ever, noted."""
        return self._touch("items")()


class RefusedLogger:
    """Replaces a logger, which belongs to the fit itself, and records its use."""

    def __init__(self) -> None:
        self.__dict__["touched"] = False

    def __getattr__(self, name: str) -> Any:
        self.__dict__["touched"] = True
        raise AttributeError(f"loggers cannot be used in a worker process, found a use of {name!r}")
