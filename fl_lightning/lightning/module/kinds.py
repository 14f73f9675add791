# SPDX-License-Identifier: Apache-2.0
"""Which objects of a module are looked at, and how: containers, tensors, arrays, generators, people's own."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from fl_lightning.core.errors import ModuleError
from fl_lightning.lightning.module.generators import GENERATORS, generator_state, put_generator_state
from fl_lightning.lightning.module.objects import Attributes, Edit, Object, same_entries, same_numbers, slots_of
from fl_lightning.lightning.names import Callback, LightningDataModule, Logger, SingleDeviceStrategy, Trainer

OF_DATA = (Dataset, DataLoader, Sampler)
_OTHERS = (
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
_LARGE = 2**20  # bytes of an array, and hundredfold items of a list, that are constant if only a data set leads to them


class _Items(Object):
    """A list, a deque, a dictionary or a set."""

    def read(self) -> Any:
        if isinstance(self.value, dict):
            return dict(self.value.items())
        return set(self.value) if isinstance(self.value, set) else list(self.value)

    def is_same(self) -> bool:
        value, then = self.value, self.content
        if isinstance(value, dict):
            return same_entries(value, then)
        return bool(value == then) if isinstance(value, set) else len(value) == len(then) and all(map(is_, value, then))

    def put(self, content: Any) -> None:
        self.value.clear()
        self.value.update(content) if isinstance(self.value, (dict, set)) else self.value.extend(content)

    def parts(self) -> Iterable[tuple[Any, str, str]]:
        steps = [(f"[{place}]", item) for place, item in enumerate(self.content)]
        if isinstance(self.content, dict):  # keys that are numbers may be ids of this process
            steps = [(f"<{place}>", key) for place, key in enumerate(self.content)]
            steps += [(f"[{k if isinstance(k, str) else at}]", v) for at, (k, v) in enumerate(self.content.items())]
        return [(part, self.name, self.path + step) for step, part in steps]

    def edits(self) -> list[Edit]:
        then, now = self.content, self.read()
        if isinstance(now, list):
            full = isinstance(self.value, deque) and len(now) == self.value.maxlen  # the first ones may have fallen out
            for rest in (then[dropped:] for dropped in range(len(then) + 1 if full else 1)):
                if len(rest) <= len(now) and all(map(is_, rest, now)):
                    return [("added", now[len(rest) :])]
        return [("whole", [now])]

    def apply(self, form: str, values: list[Any]) -> None:
        self.value.extend(values) if form == "added" else self.put(values[0])


class _Numbers(Object):
    """A tensor."""

    def is_same(self) -> bool:
        return same_numbers(self.value, self.content)

    @torch.no_grad()
    def put(self, content: Tensor) -> None:
        tensor = self.value
        if (tensor.shape, tensor.dtype, tensor.device) == (content.shape, content.dtype, content.device):
            (tensor.data if tensor.layout == torch.strided else tensor).copy_(content)
        else:
            tensor.data = content.clone()
        if tensor.is_leaf and tensor.requires_grad:
            tensor.grad = None  # what an optimizer of its own has used


class _Array(Object):
    """An array of numpy's."""

    def read(self) -> Any:
        return self.value.copy()

    def is_same(self) -> bool:
        return bool(self.value.shape == self.content.shape and self.value.tobytes() == self.content.tobytes())

    def put(self, content: Any) -> None:
        self.value[...] = content

    def parts(self) -> Iterable[tuple[Any, str, str]]:
        items = self.content.ravel().tolist() if self.content.dtype.hasobject else ()
        return [(item, self.name, f"{self.path}[{place}]") for place, item in enumerate(items)]


class _Generator(Object):
    """A random generator."""

    gathers = False

    def read(self) -> Any:
        return generator_state(self.value)

    def is_same(self) -> bool:
        now = self.read()
        return torch.equal(now, self.content) if isinstance(now, Tensor) else repr(now) == repr(self.content)

    def put(self, content: Any) -> None:
        put_generator_state(self.value, content)


class _Scaler(Object):
    """A gradient scaler, between two steps."""

    def read(self) -> dict[str, Any]:
        return self.value.state_dict()  # type: ignore[no-any-return]

    def put(self, content: dict[str, Any]) -> None:
        self.value.load_state_dict(content)
        self.value._per_optimizer_states.clear()  # of a step that broke off


class Constant(Object):
    """What is too large to be copied: tensors and long lists that only a data set leads to."""

    def read(self) -> int:
        """A mark of its changes."""
        return self.value._version if isinstance(self.value, Tensor) else len(self.value)

    def restore(self) -> None:
        """Nobody knows what it held."""
        self.content = self.read()
        raise ModuleError(
            "a data set that a module keeps must not change while clients train or are evaluated, found changes in "
            f"{self.name!r}: keep what changes in a buffer, or in a tensor or a list of the module's own"
        )


def objects_in(value: Any, name: str, path: str = "", of_data: bool = False) -> list[Object] | None:
    """What can change in a value: its content, its attributes, both or nothing; ``None``: nobody can put it back.

    ``of_data`` says that only a data set leads to it.
    """
    if isinstance(value, _OTHERS):
        return []
    if isinstance(value, Tensor):
        # A tensor with a graph is a result. Nobody writes into it, nor into one of inference mode in training.
        result = value.grad_fn is not None or (value.is_inference() and not torch.is_inference_mode_enabled())
        fixed = result or value.is_meta or value.is_quantized
        return [] if fixed else [(Constant if of_data else _Numbers)(value, name, path)]
    home = type(value).__module__.partition(".")[0]
    kind: type[Object] | None = None
    if isinstance(value, (list, deque, dict, set)):
        kind = Constant if of_data and len(value) > _LARGE // 100 else _Items
    elif isinstance(value, np.ndarray):
        kind = _Array if value.flags.writeable and not (of_data and value.nbytes > _LARGE) else None
    elif isinstance(value, GENERATORS):
        kind = _Generator
    elif isinstance(value, GradScaler):
        kind = _Scaler
    elif hasattr(value, "__next__") or home in _SYSTEM or isinstance(value, (bytearray, array)):
        return None
    found: list[Object] = [] if kind is None else [kind(value, name, path)]
    if home in _LIBRARIES and not isinstance(value, _OF_TORCH):
        return found
    return [*found, Attributes(value, name, path)] if hasattr(value, "__dict__") or slots_of(type(value)) else found
