# SPDX-License-Identifier: Apache-2.0
"""Questions about a trainer, its callbacks and its module, some of which only private attributes answer."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

from fl_lightning.core.lightning.names import Callback, LightningModule, Trainer, lightning_module

STEP_HOOKS = ("on_after_backward", "on_before_backward", "on_before_optimizer_step", "on_before_zero_grad")
"""Hooks that callbacks may have around one optimizer step."""

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of modules and data modules that a batch passes on its way to the device."""

_MODULE_HOOKS = (
    *STEP_HOOKS, "backward", "configure_gradient_clipping", "lr_scheduler_step", "on_train_batch_end",
    "on_train_batch_start", "optimizer_step", "optimizer_zero_grad",
)  # fmt: skip


def full_path_reason(trainer: Trainer, module: LightningModule) -> str | None:
    """Why local steps must run through Lightning's own optimization, or ``None`` if they need not."""
    if not module.automatic_optimization:
        return "manual optimization"
    if type(trainer.precision_plugin) is not lightning_module("plugins.precision").Precision:
        return f"precision {trainer.precision}"
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if accumulation_factors(trainer) != {1}:
        return "accumulate_grad_batches"
    for optimizer in trainer.optimizers:
        closure = signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            return f"{type(optimizer).__name__} calls for a closure"
    if trainer.gradient_clip_val is not None:
        return "gradient clipping"
    if is_profiled(trainer):
        return "a profiler"
    if getattr(trainer, "_detect_anomaly", False):
        return "anomaly detection"
    for name in sorted(_MODULE_HOOKS):
        if is_overridden(name, module):
            return f"the module overrides {name}"
    watching = step_hook_of(callbacks)
    return None if watching is None else f"{watching.replace('.', ' overrides ', 1)}"


def accumulation_factors(trainer: Trainer) -> set[int]:
    """Numbers of batches per optimizer step that the fit uses, in one round or another."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    schedule = lightning_module("callbacks").GradientAccumulationScheduler
    factors = {factor for c in callbacks if isinstance(c, schedule) for factor in c.scheduling.values()}
    return factors or {trainer.accumulate_grad_batches}


def accumulation(trainer: Trainer) -> int:
    """Batches per optimizer step; where rounds differ, what the trainer has at the moment."""
    factors = accumulation_factors(trainer)
    return factors.pop() if len(factors) == 1 else trainer.accumulate_grad_batches


def is_overridden(name: str, owner: object) -> bool:
    """Whether a module, data module or callback has a hook of its own."""
    return bool(lightning_module("utilities.model_helpers").is_overridden(name, owner))


def is_profiled(trainer: Trainer) -> bool:
    """Whether a profiler measures this trainer."""
    return type(trainer.profiler) is not lightning_module("profilers").PassThroughProfiler  # type: ignore[attr-defined]


def step_hook_of(callbacks: Sequence[Callback]) -> str | None:
    """``"Kind.hook"`` of the first callback with a hook around optimizer steps; ``None`` if there is none."""
    for callback in callbacks:
        for name in STEP_HOOKS:
            if getattr(type(callback), name) is not getattr(Callback, name):
                return f"{type(callback).__name__}.{name}"
    return None


def transfer_is_hooked(trainer: Trainer) -> bool:
    """Whether hooks of the module or the data module see batches on their way to the device."""
    owners = [trainer.lightning_module, trainer.datamodule]  # type: ignore[attr-defined]
    return any(is_overridden(name, owner) for owner in owners if owner is not None for name in TRANSFER_HOOKS)


def takes_batch_index(step: Any) -> bool:
    """Whether a ``*_step`` of a module asks for ``batch_idx`` beside the batch."""
    takes_index = lightning_module("utilities.signature_utils").is_param_in_hook_signature
    return bool(takes_index(step, "batch_idx", min_args=2))


def validation_interval(trainer: Trainer) -> int | float | str:
    """``val_check_interval`` as the user gave it: batches, a share of the epoch, or a time in words."""
    seconds = getattr(trainer, "_val_check_time_interval", None)
    interval: int | float = getattr(trainer, "val_check_interval", 1.0)
    return interval if seconds is None else f"{seconds} seconds"
