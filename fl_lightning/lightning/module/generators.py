# SPDX-License-Identifier: Apache-2.0
"""Random generators that objects keep for themselves: found, seeded for a while, read and written."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.seeding import derive_seed
from fl_lightning.lightning.names import LightningModule, Trainer

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
    """What a search for generators goes on with; in functions and classes, too."""
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
