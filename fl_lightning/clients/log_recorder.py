# SPDX-License-Identifier: Apache-2.0
"""Notes what a copy of the fit logs, for the fit itself: the module's ``log``, and loggers used directly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.core.errors import ModuleError
from fl_lightning.core.modules import submodules
from fl_lightning.core.processes import pack, unpack
from fl_lightning.lightning.fast_log import LogCall, LoggedMetric, TrainingLog, current_hook
from fl_lightning.lightning.module.contents import PLAIN
from fl_lightning.lightning.names import LightningModule


class LogRecorder(TrainingLog):
    """Stands in for the module's ``log`` and keeps its calls, and those of loggers, in their order."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__(module)
        self.calls: list[LogCall | LoggerCall] = []
        self._names = {id(part): name for name, part in submodules(module) if isinstance(part, Metric)}

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`."""
        if isinstance(value, Metric):
            if id(value) not in self._names:
                raise ModuleError(
                    f"metric objects that {type(self._module).__name__} logs must be submodules where clients train in "
                    f"other processes, found another one for {name!r}"
                )
            value = LoggedMetric(self._names[id(value)], value._forward_cache)
        value = value.detach().clone() if isinstance(value, Tensor) else value
        size = self._module.trainer.fit_loop.epoch_loop.batch_size
        self.calls.append(LogCall(current_hook(self._module), size, name, value, args, kwargs))


class LoggerCall:
    """A call of something that a logger has, such as ``logger.experiment.add_image(...)``."""

    def __init__(self, place: int, path: tuple[tuple[bool, Any], ...], args: Any, kwargs: Any) -> None:
        # Place of the logger among the trainer's, and the attributes and items (True) that lead to what is called.
        self._place, self._path, self._given = place, path, pack((args, kwargs))

    def repeat(self, loggers: list[Any]) -> None:
        """Calls it on the logger itself."""
        target = loggers[self._place]
        for is_item, name in self._path:
            target = target[name] if is_item else getattr(target, name)
        args, kwargs = unpack(self._given, torch.device("cpu"))
        target(*args, **kwargs)


class LoggerStandIn:
    """Takes the place of a logger, whose files and threads are the fit's own. Calls are noted, and give ``None``."""

    def __init__(
        self, logger: Any, place: int, calls: LogRecorder, path: tuple[tuple[bool, Any], ...] = ()
    ) -> None:  # fmt: skip
        vars(self).update(_logger=logger, _place=place, _calls=calls, _path=path)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """People ask which logger they have."""
        return type(self._logger) if not self._path else LoggerStandIn

    def __getattr__(self, name: str) -> Any:
        """A setting of the logger, or what stands in for anything else of it."""
        if name.startswith("__"):
            raise AttributeError(name)
        if not self._path and name != "experiment":
            value = getattr(self._logger, name)
            if isinstance(value, PLAIN):
                return value
        return self._step(False, name)

    def __getitem__(self, key: Any) -> Any:
        return self._step(True, key)

    def _step(self, is_item: bool, name: Any) -> LoggerStandIn:
        return LoggerStandIn(self._logger, self._place, self._calls, (*self._path, (is_item, name)))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Notes the call."""
        self._calls.calls.append(LoggerCall(self._place, self._path, args, kwargs))
