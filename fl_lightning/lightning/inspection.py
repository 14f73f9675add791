# SPDX-License-Identifier: Apache-2.0
"""Questions about a trainer, its callbacks and its module, some of which only private attributes answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any

import torch

from fl_lightning.lightning.names import Callback, LightningDataModule, LightningModule, Trainer, lightning_module

STEP_HOOKS = ("on_after_backward", "on_before_backward", "on_before_optimizer_step", "on_before_zero_grad")
"""Hooks that callbacks may have around one optimizer step."""

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of modules and data modules that a batch passes on its way to the device."""

_STRATEGY_HOOKS = ("backward", "batch_to_device", "optimizer_step", "post_backward", "pre_backward", "training_step")

_MODULE_HOOKS = (
    *STEP_HOOKS, "backward", "clip_gradients", "configure_gradient_clipping", "lr_scheduler_step",
    "on_train_batch_end", "on_train_batch_start", "optimizer_step", "optimizer_zero_grad",
)  # fmt: skip

_is_overridden: Any = lightning_module("utilities.model_helpers").is_overridden
_has_parameter: Any = lightning_module("utilities.signature_utils").is_param_in_hook_signature
_Accumulation: Any = lightning_module("callbacks").GradientAccumulationScheduler


def users_callback(callbacks: Sequence[Callback], *hooks: str) -> Callback | None:
    """The first callback, other than Lightning's and ours, that defines one of the hooks."""
    for callback in callbacks:
        for name in hooks:
            hook = getattr(callback, name)
            function = getattr(hook, "__func__", hook)
            package = (getattr(function, "__module__", None) or "").partition(".")[0]
            theirs = package not in ("lightning", "pytorch_lightning", "fl_lightning")
            if theirs and function is not getattr(Callback, name):
                return callback
    return None


def full_path_reason(trainer: Trainer, module: LightningModule) -> str | None:
    """Why local steps must run through Lightning's own optimization, or ``None`` if they need not."""
    if not module.automatic_optimization:
        return f"{type(module).__name__} optimizes manually"
    precision = trainer.precision_plugin
    own: list[Any] = list(vars(precision).values())
    if type(precision) is not lightning_module("plugins.precision").Precision or any(map(callable, own)):
        return f"Trainer(precision={trainer.precision!r})"
    window = accumulation(trainer)
    if window != 1:
        return f"accumulate_grad_batches={window}"
    for optimizer in trainer.optimizers:
        closure = signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            return f"{type(optimizer).__name__} calls for a closure"
    profiler = profiler_of(trainer)
    if profiler is not None:
        return f"Trainer(profiler={profiler})"
    if torch.is_anomaly_enabled():
        return "Trainer(detect_anomaly=True)"
    hook = next(overridden_hooks(trainer), None)
    return None if hook is None else hook.replace(".", " overrides ", 1)


def overridden_hooks(trainer: Trainer) -> Iterator[str]:
    """``"Kind.hook"`` of the hooks around local steps that do something: of module, strategy and callbacks."""
    module, strategy = trainer.lightning_module, trainer.strategy
    yield from (f"{type(module).__name__}.{n}" for n in sorted(_MODULE_HOOKS) if _differs(n, module, LightningModule))
    yield from (f"{type(strategy).__name__}.{n}" for n in _STRATEGY_HOOKS if not _is_ours(getattr(strategy, n)))
    yield from step_hooks(trainer.callbacks)  # type: ignore[attr-defined]


def accumulation(trainer: Trainer) -> int:
    """Batches per optimizer step, the same in every round."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, _Accumulation):
            factors = sorted(set(callback.scheduling.values()))
            if len(factors) > 1:
                raise ValueError(
                    "GradientAccumulationScheduler must have one factor, because every round counts as equally many "
                    f"optimizer steps: give it one, or use accumulate_grad_batches, found the factors {factors}"
                )
            return int(factors[0])
    return trainer.accumulate_grad_batches


def is_overridden(name: str, owner: object) -> bool:
    """Whether Lightning takes a module or data module to have a method of its own."""
    return bool(_is_overridden(name, owner))


def log_hyperparameters_like(one: LightningDataModule, other: LightningDataModule) -> None:
    """Lets loggers write down the hyperparameters of one data module if they do those of another."""
    one._log_hyperparams = other._log_hyperparams


def profiler_of(trainer: Trainer) -> str | None:
    """The kind of the profiler that measures this trainer; ``None`` if there is none."""
    kind = type(trainer.profiler)  # type: ignore[attr-defined]
    return None if kind is lightning_module("profilers").PassThroughProfiler else str(kind.__name__)


def step_hooks(callbacks: Sequence[Callback]) -> Iterator[str]:
    """``"Kind.hook"`` of callbacks' hooks around optimizer steps."""
    for callback in callbacks:
        yield from (f"{type(callback).__name__}.{name}" for name in STEP_HOOKS if _differs(name, callback, Callback))


def transfer_is_hooked(trainer: Trainer) -> bool:
    """Whether hooks of the module or the data module see batches on their way to the device."""
    data: LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
    owners = ((trainer.lightning_module, LightningModule), (data, LightningDataModule))
    return any(_differs(name, owner, base) for owner, base in owners if owner is not None for name in TRANSFER_HOOKS)


def _differs(name: str, owner: object, base: type[object]) -> bool:
    """Whether calling a hook of an object runs anything else than its base class has.

    Lightning calls what the instance has, maybe a function that was set on it (``LambdaCallback``,
    ``functools.wraps``).
    """
    return _function(getattr(owner, name)) is not getattr(base, name)


def _is_ours(hook: object) -> bool:
    """Whether a hook of the strategy is Lightning's or this package's, whose local steps do without it."""
    home = str(getattr(_function(hook), "__module__", "")).partition(".")[0]
    return home in (__name__.partition(".")[0], Callback.__module__.partition(".")[0])


def _function(hook: object) -> object:
    """The function behind a bound method."""
    return getattr(hook, "__func__", hook)


def takes_batch_index(step: Any) -> bool:
    """Whether a ``*_step`` of a module asks for ``batch_idx`` beside the batch."""
    return bool(_has_parameter(step, "batch_idx", min_args=2))


def validation_interval(trainer: Trainer) -> int | float | str:
    """``val_check_interval`` as the user gave it: batches, a share of the epoch, or a time in words."""
    if not hasattr(trainer, "val_check_interval"):
        return "an interval of time"
    interval: int | float = trainer.val_check_interval
    return interval
