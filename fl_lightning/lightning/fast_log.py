# SPDX-License-Identifier: Apache-2.0
"""Logging in local training: a call as a record, and ``self.log`` with less overhead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from fl_lightning.core.modules import submodules
from fl_lightning.lightning.names import LightningModule, ResultCollection, ResultMetric


class TrainingLog:
    """Takes the place of the module's ``log`` while it is installed."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._log: Callable[..., None] = module.log
        self._on_instance: Callable[..., None] | None = None
        self._hook_before: str | None = None

    def install(self, hook: str | None = None) -> None:
        """Shadows the module's ``log``, which takes itself to be in ``hook``; ``None``: whoever calls hooks sets it."""
        attributes = vars(self._module)
        self._log, self._on_instance = self._module.log, attributes.get("log")
        self._hook_before = attributes["_current_fx_name"]
        attributes["log"] = self
        if hook is not None:
            attributes["_current_fx_name"] = hook

    def remove(self) -> None:
        """Gives the module its own ``log`` back."""
        attributes = vars(self._module)
        del attributes["log"]
        attributes["_current_fx_name"] = self._hook_before
        if self._on_instance is not None:
            attributes["log"] = self._on_instance

    @property
    def is_lightnings(self) -> bool:
        """Whether what is shadowed is Lightning's own method."""
        return getattr(self._log, "__func__", None) is LightningModule.log

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`."""
        self._log(name, value, *args, **kwargs)


def current_hook(module: LightningModule) -> str:
    """The hook that ``self.log`` takes itself to be in."""
    return str(module._current_fx_name)


def replay(module: LightningModule, log: TrainingLog, call: LogCall, expect: Callable[..., None]) -> None:
    """Logs here what local training logged elsewhere; ``expect`` hears of its samples before it."""
    attributes = vars(module)  # nn.Module's own way of setting one takes as long as a small operation
    value = call.value
    if isinstance(value, LoggedMetric):
        metric: Any = dict(submodules(module))[value.name]
        if value.value is not None:
            metric._forward_cache = value.value
        value = metric
    expect(None, call.size)
    hook, attributes["_current_fx_name"] = attributes["_current_fx_name"], call.fx
    try:
        log(call.name, value, *call.args, **call.kwargs)
    finally:
        attributes["_current_fx_name"] = hook


class LoggedMetric(NamedTuple):
    """Stands for a metric object that was logged."""

    name: str  # as a part of the module
    value: Any  # what it gave for its last batch, which is logged for steps; None: nothing, for this client


@dataclass(frozen=True)
class LogCall:
    """One call of ``self.log`` in local training."""

    fx: str  # the hook that it came from, "training_step" for instance
    size: int | None  # samples of the batch in training
    name: str
    value: Any  # without a graph, or a LoggedMetric
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class FastLog(TrainingLog):
    """``self.log`` with a short path for the call that local steps repeat.

    Logging a mean once more with the same arguments goes straight to the stored metric: what Lightning checks on every
    call was checked the first time. Everything else goes to the module's own ``log``, be it Lightning's, a method of
    its class, or a function that was set on the instance. One that is not Lightning's sees every call.
    """

    def __init__(self, module: LightningModule, results: ResultCollection) -> None:
        super().__init__(module)
        self._results = results
        self._connector = module.trainer._logger_connector
        self._seen: dict[tuple[Any, ...], ResultMetric] = {}

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`."""
        results, fx = self._results, self._module._current_fx_name
        call = (fx, name, args, *kwargs.items())
        try:
            metric = self._seen.get(call)
        except TypeError:  # an unhashable argument
            self._log(name, value, *args, **kwargs)
            return
        size = results.batch_size
        if (
            metric is not None
            and size is not None
            and self._connector._first_loop_iter is False
            and isinstance(value, Tensor)
            and value.numel() == 1
            and value.device == metric.value.device
        ):
            metric.forward(value.detach().reshape(()), size)
            metric.has_reset = False
            return
        self._log(name, value, *args, **kwargs)
        if not self.is_lightnings:
            return
        if args or "batch_size" in kwargs or kwargs.get("sync_dist") or kwargs.get("enable_graph"):
            return
        entry = results.get(f"{fx}.{name}")
        if entry is not None and entry.is_tensor and entry.meta.is_mean_reduction:
            self._seen[call] = entry
