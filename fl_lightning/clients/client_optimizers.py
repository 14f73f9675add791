# SPDX-License-Identifier: Apache-2.0
"""Client optimizers: fresh for every client, or of each client's own across rounds."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.errors import ModuleError
from fl_lightning.lightning.fast_sgd import NO_STATE
from fl_lightning.lightning.optimizers import client_learning_rate, with_wrapped


class ClientOptimizers:
    """Makes the trainer's optimizers behave like a new one for each client, or ``keep`` what each one's left.

    The objects stay the same, because learning-rate schedulers refer to them. Each client starts with the state of a
    new optimizer and with the parameter groups' options from the start of the round. Optimizers from outside
    ``torch.optim`` may keep more state in attributes (numbers, tensors, lists and dicts of them) and may wrap other
    optimizers. All of this returns to what it was before the first step.

    Limit: an optimizer that copies parameters in its constructor keeps the copy from the start of the fit. No optimizer
    of ``torch.optim`` does this.
    """

    def __init__(self, optimizers: Sequence[Optimizer], keep: bool) -> None:
        self._keeps = keep
        self._client_states: dict[int, list[dict[str, Any]]] = {}
        self._pending: dict[int, list[dict[str, Any]]] = {}
        self._take(optimizers)

    def _take(self, optimizers: Sequence[Optimizer]) -> None:  # before any step of theirs
        self._optimizers = list(optimizers)
        self.states = [OptimizerState(optimizer, shared) for optimizer, shared in with_wrapped(optimizers)]
        for state in self.states:
            state.take_options()
            if self._keeps:
                state.refuse_keeping()
        self.lr, self.momentum = client_learning_rate(self._optimizers)

    def follow(self, optimizers: Sequence[Optimizer]) -> bool:
        """Takes the optimizers that callbacks may have put in the trainer; returns whether they are others.

        States of clients stay with them if the kinds are the same.
        """
        if len(optimizers) == len(self._optimizers) and all(map(is_, optimizers, self._optimizers)):
            return False
        if list(map(type, optimizers)) != list(map(type, self._optimizers)):
            self._client_states, self._pending = {}, {}
        self._take(optimizers)
        return True

    def begin_round(self) -> None:
        """Takes the groups' options, as schedulers left them, as every client's starting point."""
        for state in self.states:
            state.take_options()
        self.lr, self.momentum = client_learning_rate(self._optimizers)
        self._pending = {}

    def settable(self, group: Mapping[str, Any]) -> Set[str]:
        """The options of a group that nobody but schedulers and the module sets: optimizers may count in others."""
        plain = all(state.is_torch for state in self.states)
        return (group.keys() if plain else group.keys() & _SCHEDULED) - {"params"}

    def present_lr(self) -> float | None:
        """The learning rate at the moment, which schedulers change within a visit."""
        return client_learning_rate(self._optimizers)[0]

    def pop_pending(self, client_id: int) -> list[dict[str, Any]] | None:
        """The state that :meth:`end_client` set aside, to be carried to another process."""
        return self._pending.pop(client_id, None)

    def set_pending(self, client_id: int, state: list[dict[str, Any]] | None) -> None:
        """Takes what :meth:`pop_pending` returned in another process."""
        if state is not None:
            self._pending[client_id] = state

    def restore(self) -> None:
        """Empties the state and puts the options of the round's start back."""
        for state in self.states:
            state.restore()

    def begin_client(self, client_id: int) -> None:
        """A fresh optimizer, or the client's own from its last round."""
        self.restore()
        for state, saved in zip(self.states, self._client_states.get(client_id, []), strict=False):
            state.load(saved)

    def end_client(self, client_id: int) -> None:
        """Sets the client's state aside until its round counts."""
        if self._keeps:
            self._pending[client_id] = [state.save() for state in self.states]

    def commit(self, client_ids: Sequence[int]) -> None:
        """The round counted for these clients."""
        for client_id in client_ids:
            if client_id in self._pending:
                self._client_states[client_id] = self._pending[client_id]
        self._pending = {}

    def state_dict(self) -> dict[int, Any]:
        """States by client id."""
        return dict(self._client_states)

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Restores what :meth:`state_dict` returned, unless nothing is to be kept."""
        self._client_states = {int(client): states for client, states in state.items()} if self._keeps else {}


class OptimizerState:
    """One optimizer, and what it looks like before its first step."""

    def __init__(self, optimizer: Optimizer, shared: Mapping[int, Any]) -> None:
        self.optimizer = optimizer
        self.options: list[dict[str, Any]] = []
        self._shared = shared  # parameters, groups, states, other optimizers: copies refer to these
        self.is_torch = type(optimizer).__module__.startswith("torch.optim")
        self._initial = {key: self._copied(value) for key, value in optimizer.state.items()}  # Adagrad has some
        self._attributes = self._copied(self._present())

    def take_options(self) -> None:
        """Takes the groups' present options as those to put back."""
        self.options = [group_options(group) for group in self.optimizer.param_groups]

    def restore(self) -> None:
        """Puts state and attributes back to what they were at first, and options to what was taken."""
        optimizer = self.optimizer
        found = len(optimizer.param_groups)
        del optimizer.param_groups[len(self.options) :]  # the round's start comes back after this error, too
        if found != len(self.options):
            raise ModuleError(
                f"{type(optimizer).__name__} must keep its {len(self.options)} parameter groups during a fit, found "
                f"{found}: give all to it in configure_optimizers"
            )
        optimizer.state.clear()  # in place: wrappers hold on to it
        for key, value in self._initial.items():
            optimizer.state[key] = self._copied(value)
        if not self.is_torch:
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
                for group in (() if self.is_torch else self.optimizer.param_groups)
            ],
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continues from what :meth:`save` returned, on a restored optimizer."""
        parameters, optimizer = self._parameters(), self.optimizer
        if not parameters:  # Lightning's stand-in, where a module gives none
            return
        scalars_there = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
        for key, value in saved["state"].items():
            parameter = parameters[key if isinstance(key, int) else 0]
            optimizer.state[parameter if isinstance(key, int) else key] = _moved(value, parameter.device, scalars_there)
        device = parameters[0].device
        vars(optimizer).update({n: _moved(v, device, scalars_there) for n, v in saved["attributes"].items()})
        for group, options in zip(optimizer.param_groups, saved["options"], strict=False):
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
        if self.is_torch:
            return {}
        own = {name: value for name, value in vars(self.optimizer).items() if name not in NO_STATE}
        return {n: v for n, v in own.items() if id(v) not in self._shared and _is_plain(v, self._shared, storable)}

    def _copied(self, value: Any) -> Any:
        return copy.deepcopy(value, dict(self._shared))


# Options that learning-rate schedulers change, and what is no option.
_SCHEDULED = frozenset(
    {"lr", "initial_lr", "momentum", "betas", "weight_decay", "max_lr", "min_lr", "swa_lr", "params"}
)


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


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter group without its parameters."""
    return {name: _own(value) for name, value in group.items() if name != "params"}


def _own(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):  # copy.deepcopy takes many times as long
        return value
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def scheduled_state(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """An optimizer's part of a checkpoint in torch's layout, without the state, which belongs to clients."""
    start, packed = 0, []
    chosen = groups or [group_options(group) for group in optimizer.param_groups]
    for group, options in zip(optimizer.param_groups, chosen, strict=True):
        indices = list(range(start, start + len(group["params"])))
        start += len(indices)
        packed.append({**options, "params": indices})
    return {"state": {}, "param_groups": packed}


def load_scheduled_states(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    """Restores the options (the learning rate among them) that :func:`scheduled_state` returned for every optimizer.

    Not through ``optimizer.load_state_dict``: it empties the state, which some optimizers fill when they are made.
    """
    if states and len(states) != len(optimizers):
        raise ValueError(f"the module must have the checkpoint's {len(states)} optimizers, found {len(optimizers)}")
    for optimizer, state in zip(optimizers, states, strict=False):
        saved = state["param_groups"]
        found, expected = [len(g["params"]) for g in optimizer.param_groups], [len(g["params"]) for g in saved]
        if found != expected:
            kind = type(optimizer).__name__
            raise ValueError(f"{kind} must have the checkpoint's parameter groups, sizes {expected}, found {found}")
        for group, options in zip(optimizer.param_groups, saved, strict=True):
            group.update(group_options(options))
