# SPDX-License-Identifier: Apache-2.0
"""Which objects of a module are looked at, and how."""

from __future__ import annotations

from array import array
from collections import deque
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from fl_lightning.lightning.module.contents import ARRAY, BYTES, GENERATOR, NUMBERS, OF_DATA, Kind
from fl_lightning.lightning.module.generators import GENERATORS
from fl_lightning.lightning.module.objects import ATTRIBUTES, ITEMS, slots_of
from fl_lightning.lightning.names import Callback, LightningDataModule, Logger, SingleDeviceStrategy, Trainer

_OTHERS = (
    Trainer, SingleDeviceStrategy, Callback, LightningDataModule, Logger, ModuleType, FunctionType, BuiltinFunctionType,
    type,
)  # fmt: skip
"""What a module refers to and does not own."""

_OF_TORCH = (Optimizer, LRScheduler, GradScaler, Dataset, DataLoader, Sampler)
"""What of torch is looked into like people's own objects."""

_LIBRARIES = frozenset(
    ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics",
     "fl_lightning", "weakref", "logging", "re", "functools", "_thread", "threading")
)  # fmt: skip
"""Other objects of theirs are looked into only if they are modules, tensors, generators or containers."""

_SYSTEM = frozenset(
    ("io", "_io", "socket", "multiprocessing", "concurrent", "asyncio", "subprocess", "sqlite3", "mmap", "_queue")
)
"""Their objects stand for something outside the process's own memory, or hide what they hold."""

_LARGE = 2**20  # bytes of an array, and tenfold items of a list, that are constant if only a data set leads to them


def kinds_of(value: Any, of_data: bool = False) -> tuple[Kind, ...] | None:
    """How an object is looked at: not at all, or by what it holds, by its attributes, or both; ``None``: it cannot be.

    ``of_data`` says that only a data set leads to it.
    """
    if isinstance(value, _OTHERS):
        return ()
    if isinstance(value, Tensor):
        # A tensor with a graph is a result. Nobody writes into it, nor into one of inference mode in training.
        result = value.grad_fn is not None or (value.is_inference() and not torch.is_inference_mode_enabled())
        return () if result or value.is_meta or value.is_quantized else (OF_DATA if of_data else NUMBERS,)
    home = type(value).__module__.partition(".")[0]
    followed = home not in _LIBRARIES or isinstance(value, _OF_TORCH)
    attributes = (ATTRIBUTES,) if followed and hasattr(value, "__dict__") else ()
    if isinstance(value, (list, deque, dict, set)):
        return (OF_DATA if of_data and len(value) > _LARGE // 100 else ITEMS, *attributes)
    if isinstance(value, np.ndarray):
        constant = not value.flags.writeable or (of_data and value.nbytes > _LARGE)
        return attributes if constant else (ARRAY, *attributes)
    for types, kind in ((GENERATORS, GENERATOR), ((bytearray, array), BYTES)):
        if isinstance(value, types):
            return (kind, *attributes)
    if isinstance(value, nn.Module):
        return (ATTRIBUTES,)
    if hasattr(value, "__next__") or home in _SYSTEM:
        return None
    return attributes or ((ATTRIBUTES,) if followed and slots_of(type(value)) else ())
