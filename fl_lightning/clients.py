# SPDX-License-Identifier: Apache-2.0
"""Client optimizers: fresh for every client, or kept per client across rounds."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def client_learning_rate(optimizers: Sequence[Optimizer]) -> tuple[float | None, float]:
    """Learning rate and momentum of the clients' optimizer.

    Returns:
        The learning rate, or ``None`` unless there is a single ``torch.optim.SGD`` with one learning rate for all
        groups (only there an update is the learning rate times a sum of gradients); and its momentum.
    """
    if len(optimizers) != 1 or type(optimizers[0]) is not torch.optim.SGD:
        return None, 0.0
    groups = optimizers[0].param_groups
    rates = {float(group["lr"]) for group in groups}
    momenta = {float(group["momentum"]) for group in groups}
    if len(rates) != 1 or len(momenta) != 1:
        return None, 0.0
    return rates.pop(), momenta.pop()


class ClientOptimizers:
    """Makes the trainer's optimizers behave like a new one for each client.

    The objects stay the same, because learning-rate schedulers hold on to them. For a new client their state is what a
    new optimizer has, and every option of a parameter group is what it was when the round began. Optimizers from
    outside ``torch.optim`` may keep more state in attributes (numbers, tensors, lists and dicts of them) and may wrap
    other optimizers: all of that is put back to what it was before the first step. What such an optimizer copies from
    the parameters when it is made is therefore from the fit's start; in ``torch.optim`` and in wrappers that fill their
    state in the first step there is no such thing.

    Args:
        optimizers: the trainer's optimizers, before any step.
        keep: give a client back the state that it ended its last round with.

    Raises:
        ValueError: an optimizer keeps state that cannot be kept per client.
    """

    def __init__(self, optimizers: Sequence[Optimizer], keep: bool) -> None:
        self._slates = [_Slate(optimizer, shared) for optimizer, shared in _with_wrapped(optimizers)]
        self._keep = keep
        self._kept: dict[int, list[dict[str, Any]]] = {}
        self._pending: dict[int, list[dict[str, Any]]] = {}
        self._busy = False
        if keep:
            for slate in self._slates:
                slate.refuse_keeping()
        self.begin_round()

    def begin_round(self) -> None:
        """Takes the groups' options, as schedulers left them, as every client's starting point."""
        for slate in self._slates:
            slate.take_options()
        self._pending = {}

    def restore(self) -> None:
        """Empties the state and puts the options of the round's start back."""
        for slate in self._slates:
            slate.restore()
        self._busy = False

    def begin_client(self, client_id: int) -> None:
        """A fresh optimizer, or the client's own from its last round."""
        self.restore()
        self._busy = True
        for slate, kept in zip(self._slates, self._kept.get(client_id, []), strict=False):
            slate.load(kept)

    def end_client(self, client_id: int) -> None:
        """Sets the client's state aside until its round counts."""
        if self._keep:
            self._pending[client_id] = [slate.save() for slate in self._slates]

    def commit(self, client_ids: Sequence[int]) -> None:
        """The round counted for these clients."""
        for client_id in client_ids:
            if client_id in self._pending:
                self._kept[client_id] = self._pending[client_id]
        self._pending = {}

    @property
    def nbytes(self) -> int:
        """Bytes held for clients between rounds."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self._kept))

    def state_dict(self) -> dict[int, Any]:
        """Kept states by client id."""
        return dict(self._kept)

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Restores what :meth:`state_dict` returned, unless nothing is to be kept."""
        self._kept = {int(client): states for client, states in state.items()} if self._keep else {}

    def groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """An optimizer's options per parameter group, without what a client in training has changed."""
        if self._busy:
            return next(slate.options for slate in self._slates if slate.optimizer is optimizer)
        return [_options(group) for group in optimizer.param_groups]


def scheduled_state(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """An optimizer's part of a checkpoint in torch's layout, without the state, which belongs to clients.

    Args:
        optimizer: one of the trainer's optimizers.
        groups: options per parameter group; default: the present ones.
    """
    start, packed = 0, []
    for group, options in zip(optimizer.param_groups, groups or map(_options, optimizer.param_groups), strict=True):
        indices = list(range(start, start + len(group["params"])))
        start += len(indices)
        packed.append({**options, "params": indices})
    return {"state": {}, "param_groups": packed}


def load_scheduled_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Restores the options (the learning rate among them) that :func:`scheduled_state` returned.

    Not through ``optimizer.load_state_dict``: it empties the state, which some optimizers fill when they are made.

    Raises:
        ValueError: the parameter groups are not those of the checkpoint.
    """
    saved = state["param_groups"]
    found, expected = [len(g["params"]) for g in optimizer.param_groups], [len(g["params"]) for g in saved]
    if found != expected:
        raise ValueError(
            f"{type(optimizer).__name__} must have the checkpoint's parameter groups, sizes {expected}, found {found}"
        )
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        group.update(_options(options))


class _Slate:
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

    def take_options(self) -> None:
        self.options = [_options(group) for group in self.optimizer.param_groups]

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
            group.update(_options(options))

    def save(self) -> dict[str, Any]:
        places = {id(p): index for index, p in enumerate(self._parameters())}
        state = {places.get(id(key), key): _moved(value, None) for key, value in self.optimizer.state.items()}
        return {
            "state": state,
            "attributes": {n: _moved(v, None) for n, v in self._present(False).items()},
            # Counters that optimizers keep in their groups; what schedulers set is everybody's.
            "options": [
                {n: _moved(v, None) for n, v in _options(group).items() if n not in _SCHEDULED and _is_plain(v, {})}
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


def _with_wrapped(optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, dict[int, Any]]]:
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


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
