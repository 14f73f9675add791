# SPDX-License-Identifier: Apache-2.0
"""A loss and its gradients, computed once, with every ATen call noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class CannotPlanError(Exception):
    """A step that cannot be repeated from a recording; the message completes "eager, because ..."."""


class Call(NamedTuple):
    """One call, with the tensors that went in and came out."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


@dataclass(frozen=True)
class Recording:
    """What one run did: on which inputs, by which calls, what it returned, and gradients by place of their input."""

    inputs: Sequence[Tensor]
    calls: Sequence[Call]
    returned: Sequence[Tensor]
    gradients: Mapping[int, Tensor]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.lift_fresh.default:
            func = torch.ops.aten.clone.default  # a number becomes a tensor, a new one in every run
        self.calls.append(Call(func, args, kwargs or {}, func(*args, **(kwargs or {}))))
        return self.calls[-1].result


def record(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Recording:
    """Runs a function and the backward pass of its loss on copies, and puts the random generator back."""
    copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t.detach()) for t in inputs]
    for copy, tensor in zip(copies, inputs, strict=True):
        copy.requires_grad_(tensor.requires_grad)
    with torch.random.fork_rng(devices=()), _Recorder() as recorder:
        returned, gradients = with_gradients(function, copies)
    return Recording(copies, recorder.calls, returned, gradients)


def with_gradients(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """What a function returns, without its graph, and the gradients of its loss by place of their input.

    Raises:
        CannotPlanError: not exactly one tensor that it returns requires gradients.
    """
    returned = list(function(*inputs))
    losses = [tensor for tensor in returned if tensor.requires_grad]
    if len(losses) != 1:
        raise CannotPlanError("it keeps tensors with their graphs" if losses else "its loss has no gradients")
    places = [place for place, tensor in enumerate(inputs) if tensor.requires_grad]
    found = torch.autograd.grad(losses[0], [inputs[place] for place in places], allow_unused=True)
    gradients = {place: gradient for place, gradient in zip(places, found, strict=True) if gradient is not None}
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in returned], gradients


@cache
def begin_autograd() -> None:
    """Lets autograd look for devices before TorchDynamo makes it see some that the machine does not have.

    It starts a thread for each, and a process with such threads cannot be copied into workers that train.
    """
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
