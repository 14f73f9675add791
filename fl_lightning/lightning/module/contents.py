# SPDX-License-Identifier: Apache-2.0
"""What is in tensors, arrays and random generators: read, compared, written back in place; and what is left alone.

The generators that data keep for themselves are found here, too, and seeded for a while.
"""

from __future__ import annotations

import enum
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
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

from fl_lightning.core.seeding import derive_seed
from fl_lightning.lightning.names import (
    Callback,
    LightningDataModule,
    LightningModule,
    Logger,
    SingleDeviceStrategy,
    Trainer,
)

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


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


_LEAVES = (
    str, bytes, int, float, complex, Tensor, np.ndarray, ModuleType, BuiltinFunctionType, Trainer, LightningModule,
)  # fmt: skip


_WIDE, _MANY = 256, 5000  # items of one container, and objects in all, that are looked at


def generators_in(*roots: object) -> list[Any]:
    """The generators that objects reach by attributes, containers, closures and global names of their methods.

    Those of torch, numpy and Python, in the order in which they are found, but for the global ones, which
    :func:`~fl_lightning.core.seeding.isolated` seeds.
    """
    shared = {id(torch.default_generator), id(np.random.mtrand._rand), id(random._inst)}
    seen, found, waiting = set[int](), list[Any](), deque[Any](roots)
    while waiting and len(seen) < _MANY:
        value = waiting.popleft()
        if value is None or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, GENERATORS):
            waiting.extend(_held_anywhere_by(value))
        elif id(value) not in shared and not isinstance(value, random.SystemRandom):
            found.append(value)
    return found


def _held_anywhere_by(value: Any) -> Iterator[Any]:
    """What a search for generators goes on with; other than :func:`held_by`, in functions and classes, too."""
    if isinstance(value, type):
        return
    if isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_full(cell))
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        named = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from (found for found in named if isinstance(found, GENERATORS))
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        yield from islice(value.values() if isinstance(value, Mapping) else value, _WIDE)
    for kind in type(value).__mro__:
        if kind.__module__.partition(".")[0] not in ("builtins", "torch", "numpy", "collections", "functools"):
            yield from (member for member in vars(kind).values() if isinstance(member, FunctionType))
        slots = vars(kind).get("__slots__", ())
        yield from (getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots))
    yield from list(getattr(value, "__dict__", {}).values())


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@contextmanager
def seeded(generators: Iterable[Any], *parts: int | str) -> Iterator[None]:
    """Runs the body with each generator seeded by its place and by the parts, and gives all their states back."""
    before = [(generator, generator_state(generator)) for generator in generators]
    for place, (generator, _) in enumerate(before):
        _seed(generator, derive_seed("generator", place, *parts))
    try:
        yield
    finally:
        for generator, state in before:
            put_generator_state(generator, state)


def generator_state(generator: Any) -> Any:
    """Where a generator is."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else generator.getstate()


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF)


def put_generator_state(generator: Any, state: Any) -> None:
    """Brings a generator to where :func:`generator_state` was asked."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


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


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values that nobody changes, or two tensors, are the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(one.equal(other))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return isinstance(one, PLAIN) and (one is other or bool(one == other) or bool(one != one and other != other))
