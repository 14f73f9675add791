# SPDX-License-Identifier: Apache-2.0
"""Which values are looked into, which never change, and when two of them are the same."""

from __future__ import annotations

import enum
from array import array
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from fl_lightning.lightning.names import Callback, LightningDataModule, Logger, SingleDeviceStrategy, Trainer

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, PurePath, enum.Enum, np.generic, np.dtype,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type(Ellipsis), MappingProxyType,
)  # fmt: skip
"""Values that never change inside."""
OF_DATA = (Dataset, DataLoader, Sampler)
OTHERS = (
    Trainer, SingleDeviceStrategy, Callback, LightningDataModule, Logger, ModuleType, FunctionType, BuiltinFunctionType,
    type,
)  # fmt: skip
"""What a module refers to and does not own."""
_OF_TORCH = (Optimizer, LRScheduler, nn.Module, *OF_DATA)
"""What of torch is looked into like people's own objects."""
_LIBRARIES = frozenset(
    ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics",
     "fl_lightning", "weakref", "logging", "re", "functools", "_thread", "threading")
)  # fmt: skip
"""Other objects of theirs are looked into only if they are tensors, generators or containers."""
_SYSTEM = frozenset(
    ("io", "_io", "socket", "multiprocessing", "concurrent", "asyncio", "subprocess", "sqlite3", "mmap", "_queue")
)
"""Their objects stand for something outside the process's own memory, or hide what they hold."""
LARGE = 2**20  # bytes of an array, and hundredfold items of a list, that are constant if only a data set leads to them


def is_followed(value: object) -> bool:
    """Whether its attributes are looked into."""
    return type(value).__module__.partition(".")[0] not in _LIBRARIES or isinstance(value, _OF_TORCH)


def runs_on(value: object) -> bool:
    """Whether nobody can put it back: iterators, open files, bytes that change."""
    home = type(value).__module__.partition(".")[0]
    return hasattr(value, "__next__") or home in _SYSTEM or isinstance(value, (bytearray, array))


_SLOTS: dict[type, tuple[str, ...]] = {}


def slots_of(kind: type) -> tuple[str, ...]:
    """The slots of a class, by the names under which objects have them: private ones are called ``_Class__name``."""
    if kind not in _SLOTS:
        slotted = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
        _SLOTS[kind] = tuple(n for own in slotted for n, m in own.items() if isinstance(m, MemberDescriptorType))
    return _SLOTS[kind]


def equal_numbers(one: Tensor, other: Tensor) -> Tensor:
    """Elementwise equality, with NaN equal to NaN."""
    return (one == other) | ((one != one) & (other != other))


def same_numbers(tensor: Tensor, content: Tensor) -> bool:
    """Whether two tensors are alike and hold the same numbers, NaN among them."""
    tensor = tensor.detach()
    if (tensor.shape, tensor.dtype, tensor.device) != (content.shape, content.dtype, content.device):
        return False
    if tensor.layout != torch.strided:
        tensor, content = tensor.to_dense(), content.to_dense()
    return torch.equal(tensor, content) or bool(equal_numbers(tensor, content).all())


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are one, or mean the same: plain ones, tensors, tuples of these, empty containers."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Tensor):
        return same_numbers(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, (list, dict, set)):
        return not one and not other
    return isinstance(one, PLAIN) and (bool(one == other) or bool(one != one and other != other))
