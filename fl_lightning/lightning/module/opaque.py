# SPDX-License-Identifier: Apache-2.0
"""What nobody looks into who looks for what a module keeps."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from fl_lightning.lightning.names import Callback, LightningDataModule, Logger, SingleDeviceStrategy, Trainer

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, PurePath, enum.Enum, np.generic, np.dtype,
    torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis), MappingProxyType,
)  # fmt: skip
"""Values that never change inside."""

SHARED = (
    Trainer, SingleDeviceStrategy, Callback, LightningDataModule, Logger, Optimizer, Dataset, DataLoader, Metric,
    MetricCollection, ModuleType, FunctionType, BuiltinFunctionType, type, torch.Size,
    torch.optim.lr_scheduler.LRScheduler,
)  # fmt: skip
"""What a module refers to and does not own, and what others look after."""

LIBRARIES = frozenset(
    ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics",
     "fl_lightning", "weakref", "logging", "re", "functools", "_thread", "threading")
)  # fmt: skip
"""Their objects are looked into only if they are modules, tensors, generators or containers."""

SYSTEM = frozenset(("io", "_io", "socket", "multiprocessing", "concurrent", "asyncio", "subprocess", "sqlite3", "mmap"))
"""Their objects stand for something outside the process's own memory."""


def held_by(value: Any) -> Iterable[Any] | None:
    """What an object holds that never changes itself; ``None`` if it may."""
    if isinstance(value, (tuple, frozenset)):
        return value
    if isinstance(value, partial):
        return (value.func, value.args, value.keywords)
    return (value.__self__,) if isinstance(value, MethodType) else None
