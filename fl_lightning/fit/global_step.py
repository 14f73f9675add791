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

    @torch.no_grad()
    def tried(self, step: Tensor, norm: float, exact: list[Tensor] | None = None) -> Callable[[], object]:
        """Tries a step ``[n]``; what is returned takes it, and until then the global parameters are the old ones.

        ``exact`` are the parameters to which it leads, where they are known without the rounding of a subtraction.
        """
        theta = self._binding.theta
        if self.optimizer is not None:
            moved = self._moved(self.optimizer, step)
            return partial(theta.copy_, moved)
        # No element can overflow while the two largest together do not; a NaN fails the comparisons.
        room = torch.finfo(theta.dtype).max - _largest(theta)
        if not norm <= room and not _largest(step) <= room:
            raise RefusedStepError("the global parameters would not be finite")
        if exact is not None:
            return partial(foreach_copy_, self._binding.global_views, exact)
        return partial(theta.sub_, step.detach())

    def _moved(self, optimizer: Optimizer, step: Tensor) -> Tensor:
        """``[n]`` the parameters that the optimizer makes of the global ones."""
        binding, name = self._binding, type(optimizer).__name__
        before = {parameter: _copied(state) for parameter, state in optimizer.state.items()}
        options = [_copied({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
        moved = binding.theta.clone()
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
        return moved


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in values.items()}


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
