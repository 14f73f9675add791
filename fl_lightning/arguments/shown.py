# SPDX-License-Identifier: Apache-2.0
"""Values in a few words, for errors."""

from __future__ import annotations

import reprlib
from typing import Any

from torch import Tensor

from fl_lightning.arguments.foreign import has_numbers

_WIDE = 128  # bits of an integer that is still written out


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
