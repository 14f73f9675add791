# SPDX-License-Identifier: Apache-2.0
"""What is in tensors, arrays and random generators: read, compared, and written back in place."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.lightning.module.generators import GENERATORS, generator_state, put_generator_state


@dataclass(frozen=True)
class How:
    """How the contents of objects of one kind are looked at.

    Attributes:
        read: what an object holds; its later changes do not reach that.
        same: whether it still holds that.
        write: lets it hold that.
        parts: the objects in what it holds.
    """

    read: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], None]
    parts: Callable[[Any], Iterable[Any]] = lambda content: ()


def _same_numbers(tensor: Tensor, content: Tensor) -> bool:
    tensor = tensor.detach()
    if tensor.shape != content.shape or tensor.dtype != content.dtype or tensor.device != content.device:
        return False
    if tensor.layout != torch.strided:
        tensor, content = tensor.to_dense(), content.to_dense()
    return torch.equal(tensor, content) or bool(
        ((tensor == content) | ((tensor != tensor) & (content != content))).all()
    )


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


NUMBERS = How(lambda tensor: tensor.detach().clone(), _same_numbers, _put_numbers)
"""Of a tensor."""

OTHERS: tuple[tuple[Any, How], ...] = (
    (GENERATORS, How(generator_state, _same_draws, put_generator_state)),
    (np.ndarray, How(np.ndarray.copy, _same_array, _put_array, _parts_of_array)),
    ((bytearray, array), How(lambda value: value[:], lambda value, content: bool(value == content), _put_bytes)),
)
"""By type, of everything else."""
