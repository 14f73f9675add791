# SPDX-License-Identifier: Apache-2.0
"""The cheapest way from Python to an ATen operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.training.planned.program import Register

_FUNCTIONS = (torch._C._VariableFunctions, torch._C._nn)


def quick(op: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """A function that calls the same operation with arguments like these, in half the time where there is one.

    ``torch.ops`` converts arguments by the operation's schema, one by one; ``torch.addmm`` and the like have parsers of
    their own. Which operation they call is tried out, without running it.

    Args:
        op: an operation.
        args: tensors, registers of tensors that a run makes, and other values.
        kwargs: the same, by name.
    """
    if not isinstance(op, OpOverload) or op._schema.is_mutable is (len(_outs(kwargs)) == 0):
        return op
    args, kwargs = _stand_ins(args), {name: _stand_ins(value) for name, value in kwargs.items()}
    name = op.overloadpacket.__name__
    for home in _FUNCTIONS:
        function: Callable[..., Any] | None = getattr(home, name, None)
        if function is not None and _called(function, args, kwargs) == [op]:
            return function
    return getattr(op, "_op", op)  # without the call through Python that is around it


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations, and runs none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        raise _NotedError


class _NotedError(Exception):
    """An operation was called."""


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The first operation that a function calls, if there is one."""
    noted = _Noted()
    with suppress(Exception), noted:  # perhaps there is none with these arguments
        function(*args, **kwargs)
    return noted.called


def _outs(kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in kwargs.values() if isinstance(value, Tensor)]


def _stand_ins(value: Any) -> Any:
    """The same with tensors in the place of registers."""
    if isinstance(value, Register):
        like = value.like
        return like if like is None else torch.empty_strided(tuple(like.shape), tuple(like.stride()), dtype=like.dtype)
    if isinstance(value, (list, tuple)):
        return type(value)([_stand_ins(part) for part in value])
    return value
