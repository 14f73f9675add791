# SPDX-License-Identifier: Apache-2.0
"""Training steps whose traces in Python objects are noticed and taken back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning._lightning import LightningModule
from fl_lightning.results import MetricState
from fl_lightning.seeding import _device_state

_MOVING = frozenset({"callback_metrics", "global_step", "logged_metrics", "progress_bar_metrics"})
# Parameters and buffers are the caller's business; the rest changes at every step.
_SKIPPED = frozenset(
    {"_parameters", "_buffers", "_modules", "_trainer", "_current_fx_name", "_metric_attributes", "log", "log_dict"}
)
RANDOM = "training draws random numbers (dropout, for instance), and a pass over several clients would draw others"
_PLAIN = (bool, int, float, str, bytes)


class _WatchedTrainer:
    """Stands for the trainer and remembers whether somebody asked for what changes from client to client."""

    def __init__(self, trainer: Any, asked: set[str]) -> None:
        vars(self).update(_given=trainer, _asked=asked)

    def __getattr__(self, name: str) -> Any:
        if name in _MOVING:
            self._asked.add(name)
        return getattr(vars(self)["_given"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._given, name, value)


@contextmanager
def undone(module: LightningModule, device: torch.device) -> Iterator[Callable[[], str | None]]:
    """Lets the module train, and afterwards makes it what it was, apart from parameters and buffers.

    Yields:
        A function that says what training has done besides computing losses, or ``None``: drawn random numbers, changed
        an attribute or a metric, asked the trainer for what depends on the clients before.
    """
    asked: set[str] = set()
    parts = dict(module.named_modules())
    metrics = [MetricState(m) for m in parts.values() if isinstance(m, Metric)]
    before = {prefix: _kept(part) for prefix, part in parts.items() if not isinstance(part, Metric)}
    draws = _draws(device)
    watched = [m for m in parts.values() if isinstance(m, LightningModule)]
    trainers = [m._trainer for m in watched]
    for owner, trainer in zip(watched, trainers, strict=True):
        vars(owner)["_trainer"] = _WatchedTrainer(trainer, asked)

    def traces() -> str | None:
        if _draws(device) != draws:
            return RANDOM
        for name in sorted(asked):
            return f"training_step asks for trainer.{name}, which changes from client to client"
        for prefix, part in parts.items():
            for name, (value, inside) in before.get(prefix, {}).items():
                if not _same(vars(part).get(name), value, inside):
                    return f"training_step changes the attribute {prefix}{'.' if prefix else ''}{name}"
            for name in vars(part).keys() - before.get(prefix, vars(part)).keys() - _SKIPPED:
                return f"training_step changes the attribute {prefix}{'.' if prefix else ''}{name}"
        if not all(state.is_current for state in metrics):
            return "training_step updates a metric"
        return None

    try:
        yield traces
    finally:
        for owner, trainer in zip(watched, trainers, strict=True):
            vars(owner)["_trainer"] = trainer
        for prefix, kept in before.items():
            _put_back(parts[prefix], kept)
        for state in metrics:
            state.put_back()


def _draws(device: torch.device) -> tuple[Any, ...]:
    numpy_state = np.random.get_state(legacy=False)["state"]
    states = (torch.get_rng_state(), _device_state(device))
    torch_states = tuple(None if state is None else bytes(state.cpu().numpy()) for state in states)
    return random.getstate(), bytes(numpy_state["key"]), numpy_state["pos"], *torch_states


def _kept(part: nn.Module) -> dict[str, tuple[Any, Any]]:
    return {name: (value, _inside(value)) for name, value in vars(part).items() if name not in _SKIPPED}


def _inside(value: Any) -> Any:
    """What may change inside a value while it stays the same object."""
    if isinstance(value, (list, deque)):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, set):
        return set(value)
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _same(now: Any, value: Any, inside: Any) -> bool:
    if now is not value:
        return type(now) is type(value) and isinstance(now, _PLAIN) and now == value
    if isinstance(value, (list, deque)):
        return len(now) == len(inside) and all(a is b for a, b in zip(now, inside, strict=True))
    if isinstance(value, dict):
        return now.keys() == inside.keys() and all(now[key] is inside[key] for key in inside)
    if isinstance(value, set):
        return bool(now == inside)
    return bool(_inside(value) == inside)


def _put_back(part: nn.Module, kept: dict[str, tuple[Any, Any]]) -> None:
    for name in [name for name in vars(part) if name not in kept and name not in _SKIPPED]:
        del vars(part)[name]
    for name, (value, inside) in kept.items():
        vars(part)[name] = value
        if isinstance(value, (list, deque, dict, set)) and not _same(value, value, inside):
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(inside)
