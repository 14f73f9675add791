# SPDX-License-Identifier: Apache-2.0
"""An optimizer as it is before its first step, to which it can be put back."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class OptimizerSlate:
    """One optimizer, and what it looks like before its first step.

    Args:
        optimizer: the optimizer.
        shared: objects that copies refer to instead of copying them: parameters, groups, states, other optimizers.
    """

    def __init__(self, optimizer: Optimizer, shared: Mapping[int, Any]) -> None:
        self.optimizer = optimizer
        self.options: list[dict[str, Any]] = []
        self._shared = shared
        self._is_torch = type(optimizer).__module__.startswith("torch.optim")
        self._initial = {key: self._copied(value) for key, value in optimizer.state.items()}  # Adagrad has some
        self._attributes = self._copied(self._present())

    def takegroup_options(self) -> None:
        self.options = [group_options(group) for group in self.optimizer.param_groups]

    def restore(self) -> None:
        optimizer = self.optimizer
        optimizer.state.clear()  # in place: wrappers hold on to it
        for key, value in self._initial.items():
            optimizer.state[key] = self._copied(value)
        for name in self._present().keys() - self._attributes.keys():
            delattr(optimizer, name)
        vars(optimizer).update(self._copied(self._attributes))
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            for name in group.keys() - options.keys() - {"params"}:
                del group[name]
            group.update(group_options(options))

    def save(self) -> dict[str, Any]:
        places = {id(p): index for index, p in enumerate(self._parameters())}
        state = {places.get(id(key), key): _moved(value, None) for key, value in self.optimizer.state.items()}
        return {
            "state": state,
            "attributes": {n: _moved(v, None) for n, v in self._present(False).items()},
            # Counters that optimizers keep in their groups; what schedulers set is everybody's.
            "options": [
                {n: _moved(v, None) for n, v in group_options(group).items() if n not in _SCHEDULED and _is_plain(v, {})}
                for group in (() if self._is_torch else self.optimizer.param_groups)
            ],
        }

    def load(self, kept: Mapping[str, Any]) -> None:
        parameters, optimizer = self._parameters(), self.optimizer
        scalars_there = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
        for key, value in kept["state"].items():
            parameter = parameters[key if isinstance(key, int) else 0]
            optimizer.state[parameter if isinstance(key, int) else key] = _moved(value, parameter.device, scalars_there)
        device = parameters[0].device
        vars(optimizer).update({n: _moved(v, device, scalars_there) for n, v in kept["attributes"].items()})
        for group, options in zip(optimizer.param_groups, kept["options"], strict=False):
            group.update({n: _moved(v, device, scalars_there) for n, v in options.items()})

    def refuse_keeping(self) -> None:
        for name, value in self._present().items():
            if isinstance(value, dict) and not all(isinstance(key, (str, int)) for key in value):
                raise ValueError(
                    f"client_optimizer_state='keep' cannot keep {type(self.optimizer).__name__}.{name}, a dict whose "
                    "keys are not all strings and integers: put it into optimizer.state, or use 'reset'"
                )

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _present(self, with_shared: bool = True) -> dict[str, Any]:
        """The attributes that hold state, which only optimizers from outside torch have."""
        if self._is_torch:
            return {}
        shared = self._shared if with_shared else {}
        own = {name: value for name, value in vars(self.optimizer).items() if name not in _NO_STATE}
        return {n: v for n, v in own.items() if id(v) not in self._shared and _is_plain(v, shared)}

    def _copied(self, value: Any) -> Any:
        return copy.deepcopy(value, dict(self._shared))


# What torch.optim.Optimizer itself and learning-rate schedulers put into an optimizer.
_NO_STATE = frozenset(vars(torch.optim.SGD([torch.zeros(())], lr=0.1))) | {"_opt_called", "step"}
# The options that learning-rate schedulers change.
_SCHEDULED = frozenset({"lr", "initial_lr", "momentum", "betas", "weight_decay", "max_lr", "min_lr", "swa_lr"})


def with_wrapped(optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, dict[int, Any]]]:
    """The optimizers and those in their attributes, and the objects that they may share."""
    found: dict[int, Optimizer] = {}
    waiting = list(optimizers)
    while waiting:
        optimizer = waiting.pop(0)
        if id(optimizer) not in found:
            found[id(optimizer)] = optimizer
            waiting += [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    shared: dict[int, Any] = dict(found)
    for optimizer in found.values():
        groups = optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        lists = [group["params"] for group in groups]
        shared |= {id(o): o for o in (*parameters, *lists, *groups, groups, optimizer.state)}
    return [(optimizer, shared) for optimizer in found.values()]


def _is_plain(value: Any, shared: Mapping[int, Any]) -> bool:
    if value is None or id(value) in shared or isinstance(value, (bool, int, float, str, Tensor)):
        return True
    if isinstance(value, Mapping):
        return all(_is_plain(k, shared) and _is_plain(v, shared) for k, v in value.items())
    return isinstance(value, (list, tuple, set, deque)) and all(_is_plain(v, shared) for v in value)


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in group.items() if name != "params"}
    return {n: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v) for n, v in own.items()}


def _moved(value: Any, device: torch.device | None, scalars: bool = False) -> Any:
    """A copy on the CPU, or on a device; there numbers in tensors (step counters) go only if told to."""
    if isinstance(value, Tensor):
        to = device if device is not None and (value.dim() > 0 or scalars) else torch.device("cpu")
        return value.detach().to(to, copy=True)
    if isinstance(value, Mapping):
        return {k: _moved(v, device, scalars) for k, v in value.items()}
    if isinstance(value, list):
        return [_moved(v, device, scalars) for v in value]
    if isinstance(value, tuple):
        return tuple(_moved(v, device, scalars) for v in value)
    return copy.deepcopy(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
