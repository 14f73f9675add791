# SPDX-License-Identifier: Apache-2.0
"""The server's step on the global parameters: it is tried first, and taken only if all that it leaves is finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.core.tensors import all_finite, foreach_copy_, not_finite

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


class RefusedStepError(Exception):
    """What would not be finite after a step, as the end of a sentence; parameters and optimizer are as before."""


class GlobalStep:
    """Moves the global parameters, by subtracting a step or with an optimizer that takes it for its gradient."""

    def __init__(self, binding: BoundParameters, factory: OptimizerFactory | None) -> None:
        self._binding = binding
        self.optimizer = None if factory is None else _made(factory, binding.parameters)
        self._spares = _Spares()

    @torch.no_grad()
    def tried(self, step: Tensor, norm: float, exact: list[Tensor] | None = None) -> Callable[[], None]:
        """Tries a step ``[n]``; what is returned takes it, and until then the global parameters are the old ones.

        ``exact`` are the parameters to which it leads, where they are known without the rounding of a subtraction.
        """
        theta = self._binding.theta
        if self.optimizer is not None:
            moved = self._moved(self.optimizer, step)
            return partial(self._assign, moved)
        # No element can overflow while the two largest together do not; a NaN fails the comparisons.
        room = torch.finfo(theta.dtype).max - _largest(theta)
        if not norm <= room and not _largest(step) <= room:
            raise RefusedStepError("the global parameters would not be finite")
        if exact is not None:
            return partial(foreach_copy_, self._binding.global_views, exact)
        return partial(_subtract, theta, step)

    def _moved(self, optimizer: Optimizer, step: Tensor) -> Tensor:
        """``[n]`` the parameters that the optimizer makes of the global ones."""
        binding, name = self._binding, type(optimizer).__name__
        before = {parameter: self._copies(state) for parameter, state in optimizer.state.items()}
        options = [self._copies({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
        moved = self._spares.copy(binding.theta)
        views = binding.layout.views(moved)
        binding.bind(views)
        try:
            for parameter, gradient in zip(binding.parameters, binding.layout.views(step), strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
            binding.reclaim(views)
            if not bool(all_finite(moved)):
                raise RefusedStepError(f"the global parameters would not be finite after {name}")
            broken = _not_finite(optimizer)
            if broken:
                raise RefusedStepError(f"{', '.join(broken)} of {name} would not be finite")
        except BaseException:
            optimizer.state.clear()
            optimizer.state.update(before)
            for group, options_before in zip(optimizer.param_groups, options, strict=True):
                group.update(options_before)
            raise
        finally:
            binding.bind_global()
        for copies in (*before.values(), *options):
            self._spares.release(copies.values())
        return moved

    def _copies(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._spares.copy(v) if isinstance(v, Tensor) else v for name, v in values.items()}

    @torch.no_grad()
    def _assign(self, moved: Tensor) -> None:
        self._binding.theta.copy_(moved)
        self._spares.release([moved])


class _Spares:
    """Memory of copies, kept from round to round: to make it anew takes longer than to copy."""

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], list[Tensor]] = {}

    @torch.no_grad()
    def copy(self, value: Tensor) -> Tensor:
        """A copy that is nobody else's until it is given back."""
        free = self._free.get(_kind(value))
        return (free.pop() if free else torch.empty_like(value)).copy_(value)

    def release(self, copies: Iterable[Any]) -> None:
        """Takes back what nobody looks at any more; other values than tensors are passed over."""
        for value in copies:
            if isinstance(value, Tensor):
                self._free.setdefault(_kind(value), []).append(value)


def _kind(value: Tensor) -> tuple[object, ...]:
    return value.shape, value.stride(), value.dtype, value.device


def _not_finite(optimizer: Optimizer) -> list[str]:
    """Names of the optimizer's state whose tensors hold NaN or infinity."""
    named = {
        (name, place): value
        for place, state in enumerate(optimizer.state.values())
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    return sorted({name for name, _ in not_finite(named)})


def _largest(values: Tensor) -> float:
    """The largest absolute value; NaN if there is one."""
    low, high = values.aminmax()
    return float(torch.maximum(-low, high))


@torch.no_grad()
def _subtract(theta: Tensor, step: Tensor) -> None:
    theta.sub_(step)


def _made(factory: OptimizerFactory, parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = factory(parameters)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"server_optimizer must make a torch.optim.Optimizer from parameters, found {type(optimizer).__name__}: "
            "pass functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9), for instance"
        )
    if isinstance(optimizer, SparseAdam):
        raise ValueError("server_optimizer must take dense gradients, the server's step, found SparseAdam: take Adam")
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(
            "server_optimizer must make an optimizer that steps on one gradient, the server's step, found "
            f"{type(optimizer).__name__}, whose step needs a closure: take torch.optim.SGD or Adam, for instance"
        )
    return optimizer
