# SPDX-License-Identifier: Apache-2.0
"""How clients train: how long, and with or without Lightning's hooks around a step."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature

from fl_lightning.core.lightning.names import Callback, LightningModule, Trainer, lightning_module

_LEAN_MODULE_HOOKS = (
    "backward", "configure_gradient_clipping", "lr_scheduler_step", "on_after_backward", "on_before_backward",
    "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_train_batch_start",
    "optimizer_step", "optimizer_zero_grad",
)  # fmt: skip
_LEAN_CALLBACK_HOOKS = ("on_after_backward", "on_before_backward", "on_before_optimizer_step", "on_before_zero_grad")


@dataclass(frozen=True)
class LocalPlan:
    """How long clients train.

    Attributes:
        epochs: passes over the client's data, unless ``steps`` is given.
        steps: optimizer steps, whatever the client's size.
        limit: batches per pass: a count, or a fraction of the client's batches (at least one).
        seed: root of all local randomness.
    """

    epochs: int
    steps: int | None
    limit: int | float
    seed: int

    def batches(self, available: int) -> int:
        """Batches of one pass over a client that has ``available``."""
        if isinstance(self.limit, int):
            return min(self.limit, available)
        return min(max(1, int(self.limit * available)), available)


def full_path_reason(trainer: Trainer, module: LightningModule) -> str | None:
    """Why the lean path may not be taken, or ``None`` if it may."""
    is_overridden = lightning_module("utilities.model_helpers").is_overridden
    if not module.automatic_optimization:
        return "manual optimization"
    if type(trainer.precision_plugin) is not lightning_module("plugins.precision").Precision:
        return f"precision {trainer.precision}"
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    schedule = lightning_module("callbacks").GradientAccumulationScheduler
    if trainer.accumulate_grad_batches != 1 or any(isinstance(callback, schedule) for callback in callbacks):
        return "accumulate_grad_batches"
    for optimizer in trainer.optimizers:
        closure = signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            return f"{type(optimizer).__name__} calls for a closure"
    if trainer.gradient_clip_val is not None:
        return "gradient clipping"
    if type(trainer.profiler) is not lightning_module("profilers").PassThroughProfiler:  # type: ignore[attr-defined]
        return "a profiler"
    if getattr(trainer, "_detect_anomaly", False):
        return "anomaly detection"
    for name in _LEAN_MODULE_HOOKS:
        if is_overridden(name, module):
            return f"the module overrides {name}"
    for callback in callbacks:
        for name in _LEAN_CALLBACK_HOOKS:
            if getattr(type(callback), name) is not getattr(Callback, name):
                return f"{type(callback).__name__} overrides {name}"
    return None
