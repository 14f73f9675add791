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

from fl_lightning.core.errors import ModuleError


class OptimizerState:
    """One optimizer, and what it looks like before its first step."""

    def __init__(self, optimizer: Optimizer, shared: Mapping[int, Any]) -> None:
        self.optimizer = optimizer
        self.options: list[dict[str, Any]] = []
        self._shared = shared  # parameters, groups, states, other optimizers: copies refer to these
        self._is_torch = type(optimizer).__module__.startswith("torch.optim")
        self._initial = {key: self._copied(value) for key, value in optimizer.state.items()}  # Adagrad has some
        self._attributes = self._copied(self._present())

    def take_options(self) -> None:
        """Takes the groups' present options as those to put back."""
        self.options = [group_options(group) for group in self.optimizer.param_groups]

    def restore(self) -> None:
        """Puts state and attributes back to what they were at first, and options to what was taken."""
        optimizer = self.optimizer
        if len(optimizer.param_groups) != len(self.options):
            raise ModuleError(
                f"{type(optimizer).__name__} must keep its {len(self.options)} parameter groups during a fit, found "
                f"{len(optimizer.param_groups)}: give all to it in configure_optimizers"
            )
        optimizer.state.clear()  # in place: wrappers hold on to it
        for key, value in self._initial.items():
            optimizer.state[key] = self._copied(value)
        if not self._is_torch:
            for name in self._present().keys() - self._attributes.keys():
                delattr(optimizer, name)
            vars(optimizer).update(self._copied(self._attributes))
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            for name in group.keys() - options.keys() - {"params"}:
                del group[name]
            group.update(group_options(options))

    def save(self) -> dict[str, Any]:
        """Copies on the CPU of all that the steps since have changed; plain enough for a checkpoint."""
        places = {id(p): index for index, p in enumerate(self._parameters())}
        state = {places.get(id(key), key): _moved(value, None) for key, value in self.optimizer.state.items()}
        return {
            "state": state,
            "attributes": {n: _moved(v, None) for n, v in self._present(storable=True).items()},
            # Counters that optimizers keep in their groups; what schedulers set is everybody's.
            "options": [
                {
                    n: _moved(v, None)
                    for n, v in group.items()
                    if n not in _SCHEDULED and _is_plain(v, self._shared, True)
                }
                for group in (() if self._is_torch else self.optimizer.param_groups)
            ],
        }

    def load(self, kept: Mapping[str, Any]) -> None:
        """Continues from what :meth:`save` returned, on a restored optimizer."""
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
        """Raises ValueError if there is state that :meth:`save` cannot copy."""
        for name, value in self._present().items():
            shared = [id(leaf) in self._shared for leaf in leaves(value)]
            if any(shared) and not all(shared):
                raise ValueError(
                    f"client_optimizer_state='keep' cannot keep {type(self.optimizer).__name__}.{name}, which mixes "
                    "parameters with values of its own: put those into optimizer.state, or use 'reset'"
                )

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _present(self, storable: bool = False) -> dict[str, Any]:
        """The attributes that hold state, which only optimizers from outside torch have."""
        if self._is_torch:
            return {}
        own = {name: value for name, value in vars(self.optimizer).items() if name not in _NO_STATE}
        return {n: v for n, v in own.items() if id(v) not in self._shared and _is_plain(v, self._shared, storable)}

    def _copied(self, value: Any) -> Any:
        return copy.deepcopy(value, dict(self._shared))


# What torch.optim.Optimizer itself and learning-rate schedulers put into an optimizer.
_NO_STATE = frozenset(vars(torch.optim.SGD([torch.zeros(())], lr=0.1))) | {"_opt_called", "step"}
# Options that learning-rate schedulers change, and what is no option.
_SCHEDULED = frozenset(
    {"lr", "initial_lr", "momentum", "betas", "weight_decay", "max_lr", "min_lr", "swa_lr", "params"}
)


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


def leaves(value: Any) -> Iterator[Any]:
    """All values in nested dicts, lists, tuples, sets and deques, keys included."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, deque)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def _is_plain(value: Any, shared: Mapping[int, Any], storable: bool) -> bool:
    """Whether there are only numbers, strings and tensors in it, and parameters unless it is to be stored."""
    return all(
        not storable if id(leaf) in shared else leaf is None or isinstance(leaf, (bool, int, float, str, Tensor))
        for leaf in leaves(value)
    )


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter group without its parameters."""
    return {name: _own(value) for name, value in group.items() if name != "params"}


def _own(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):  # copy.deepcopy takes many times as long
        return value
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


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
