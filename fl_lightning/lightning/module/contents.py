# SPDX-License-Identifier: Apache-2.0
"""What is in tensors, arrays and generators: read, compared, written back in place; and what nobody looks into."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import is_
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from fl_lightning.lightning.module.generators import GENERATORS, generator_state, put_generator_state
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


@dataclass(frozen=True)
class How:
    """How the contents of objects of one kind are looked at."""

    read: Callable[[Any], Any]  # what an object holds; its later changes do not reach that
    same: Callable[[Any, Any], bool]  # whether it still holds that
    write: Callable[[Any, Any], None]  # lets it hold that
    parts: Callable[[Any], Iterable[Any]] = lambda content: ()  # the objects in what it holds


def equal_numbers(one: Tensor, other: Tensor) -> Tensor:
    """Elementwise equality, with NaN equal to NaN."""
    return (one == other) | ((one != one) & (other != other))


def same_numbers(tensor: Tensor, content: Tensor) -> bool:
    """Whether two tensors are alike and hold the same numbers, NaN among them."""
    tensor = tensor.detach()
    if tensor.shape != content.shape or tensor.dtype != content.dtype or tensor.device != content.device:
        return False
    if tensor.layout != torch.strided:
        tensor, content = tensor.to_dense(), content.to_dense()
    return torch.equal(tensor, content) or bool(equal_numbers(tensor, content).all())


@torch.no_grad()
def _put_numbers(tensor: Tensor, content: Tensor) -> None:
    value = tensor.data if tensor.layout == torch.strided else tensor
    if value.shape == content.shape and value.dtype == content.dtype and value.device == content.device:
        value.copy_(content)
    else:
        tensor.data = content.clone()


def _same_array(value: Any, content: Any) -> bool:
    if value.dtype.hasobject:
        return value.shape == content.shape and all(map(is_, value.ravel().tolist(), content.ravel().tolist()))
    return bool(value.shape == content.shape and value.tobytes() == content.tobytes())


def _put_array(value: Any, content: Any) -> None:
    if value.shape != content.shape:
        value.resize(content.shape, refcheck=False)
    value[...] = content


def _put_bytes(value: Any, content: Any) -> None:
    value[:] = content


def _same_draws(generator: Any, state: Any) -> bool:
    now = generator_state(generator)
    return torch.equal(now, state) if isinstance(now, Tensor) else repr(now) == repr(state)


def _parts_of_array(content: Any) -> Iterable[Any]:
    return content.ravel().tolist() if content.dtype.hasobject else ()


NUMBERS = How(lambda tensor: tensor.detach().clone(), same_numbers, _put_numbers)
"""Of a tensor."""

OTHERS: tuple[tuple[Any, How], ...] = (
    (GENERATORS, How(generator_state, _same_draws, put_generator_state)),
    (np.ndarray, How(np.ndarray.copy, _same_array, _put_array, _parts_of_array)),
    ((bytearray, array), How(lambda value: value[:], lambda value, content: bool(value == content), _put_bytes)),
)
"""By type, of everything else."""
