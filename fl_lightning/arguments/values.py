# SPDX-License-Identifier: Apache-2.0
"""Values of all kinds and libraries: whether their numbers can be read, the same as Python's, and in a few words."""

from __future__ import annotations

import math
import reprlib
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

_WIDE = 128  # bits of an integer that is still written out


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be read one by one: it is dense, and not on the meta device.

    Of other libraries' kinds of tensors nobody knows; theirs may be somewhere else.
    """
    empty = tensor.is_meta and type(tensor) in (Tensor, torch.nn.Parameter)
    return not (empty or tensor.is_nested or tensor.layout != torch.strided)


def is_array(value: Any) -> bool:
    """Whether this is an array or a tensor with dimensions, whose numbers can be read."""
    if isinstance(value, Tensor):
        return has_numbers(value) and value.dim() > 0
    return hasattr(value, "tolist") and getattr(value, "ndim", 0) > 0


def pythons(value: Any) -> Any:
    """A number of numpy, or a tensor or array without dimensions, as Python's; other values as they are."""
    if isinstance(value, Tensor) and not has_numbers(value):
        return value
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def plain(number: Any) -> int | float:
    """A number of any class as an int or a float."""
    if isinstance(number, Integral):
        return int(number)
    try:
        return float(number)
    except OverflowError:  # a fraction
        return math.inf if number > 0 else -math.inf


class _Short(reprlib.Repr):
    """Knows the kinds whose own words are long, fail, or take several lines, also inside containers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= _WIDE else f"an integer of {x.bit_length()} bits"

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, Tensor):
            return _tensor(x) if x.dim() or not has_numbers(x) else repr(x)
        shape = getattr(x, "shape", ())
        if isinstance(shape, tuple) and shape and hasattr(x, "dtype"):
            return f"an array of {x.dtype} and shape {list(shape)}"
        text = super().repr_instance(x, level)
        return text if "\n" not in text else f"<{type(x).__name__} object>"


def _tensor(tensor: Tensor) -> str:
    if tensor.is_nested:
        return f"a nested tensor of {tensor.dtype}"
    layout = str(tensor.layout).removeprefix("torch.")
    kind = "a meta tensor" if tensor.is_meta else "a tensor" if has_numbers(tensor) else f"a {layout} tensor"
    return f"{kind} of {tensor.dtype} and shape {list(tensor.shape)}"


_short = _Short()


def shown(value: Any) -> str:
    """A value in a few words of one line."""
    return _short.repr(value)
