# SPDX-License-Identifier: Apache-2.0
"""Numbers of other libraries, as Python's."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor


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
