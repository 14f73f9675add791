# SPDX-License-Identifier: Apache-2.0
"""What is in tensors, arrays and random generators: read, compared, written back in place."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from functools import partial
from operator import is_
from pathlib import PurePath
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import MetricCollection

from fl_lightning.lightning.module.generators import generator_state, put_generator_state

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, PurePath, enum.Enum, np.generic, np.dtype,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type(Ellipsis), MappingProxyType,
)  # fmt: skip
"""Values that never change inside."""


Step = tuple[str, Any]
"""How one gets to an object from one that holds it, in any copy of both; and the object."""


class Kind(NamedTuple):
    """How objects of one kind are looked at."""

    read: Callable[[Any], Any]  # what one holds; its later changes do not reach that
    same: Callable[[Any, Any], bool]  # whether it still holds that; objects in it are looked at by themselves
    write: Callable[[Any, Any], None]  # lets it hold that
    parts: Callable[[Any], Iterable[Step]] = lambda content: ()  # the objects in what it holds
    change: Callable[[Any, Any, Any], Any] = lambda value, then, now: now  # what :meth:`Object.apply` needs


HOLDERS = (tuple, frozenset, partial, MethodType, MetricCollection)
"""What never changes itself, but for collections, of which others look after the attributes."""


def held_by(value: Any) -> Iterable[Step]:
    """What one of the ``HOLDERS`` holds."""
    if isinstance(value, MethodType):
        return [(".__self__", value.__self__)]
    if isinstance(value, MetricCollection):
        value = value.values(copy_state=False)
    return numbered((value.func, value.args, value.keywords) if isinstance(value, partial) else value)


def numbered(values: Iterable[Any]) -> list[Step]:
    """The steps to the items of a sequence."""
    return [(f"[{place}]", value) for place, value in enumerate(values)]


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


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values that nobody changes, or two tensors, are the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(one.equal(other))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return isinstance(one, PLAIN) and (one is other or bool(one == other) or bool(one != one and other != other))


@torch.no_grad()
def _put_numbers(tensor: Tensor, content: Tensor) -> None:
    value = tensor.data if tensor.layout == torch.strided else tensor
    if value.shape == content.shape and value.dtype == content.dtype and value.device == content.device:
        value.copy_(content)
    else:
        tensor.data = content.clone()
    if tensor.is_leaf and tensor.requires_grad:
        tensor.grad = None  # what an optimizer of its own has used


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


def _mark(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else len(value)


NUMBERS = Kind(
    lambda tensor: tensor.detach().clone(), lambda tensor, content: same_numbers(tensor, content), _put_numbers
)
ARRAY = Kind(
    np.ndarray.copy,
    _same_array,
    _put_array,
    lambda content: numbered(content.ravel().tolist()) if content.dtype.hasobject else (),
)
BYTES = Kind(lambda value: value[:], lambda value, content: bool(value == content), _put_bytes)
GENERATOR = Kind(generator_state, _same_draws, put_generator_state)
OF_DATA = Kind(_mark, lambda value, mark: _mark(value) == mark, lambda value, mark: None)
"""What only a data set leads to: it is too large to be copied."""
