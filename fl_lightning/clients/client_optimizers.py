# SPDX-License-Identifier: Apache-2.0
"""Client optimizers: fresh for every client, or kept per client across rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from fl_lightning.clients.optimizer_state import OptimizerState, group_options, with_wrapped


def client_learning_rate(optimizers: Sequence[Optimizer]) -> tuple[float | None, float]:
    """Learning rate and momentum of the clients' optimizer.

    The rate is ``None`` unless there is a single ``torch.optim.SGD`` with one learning rate for all groups that
    descends: only there an update is the learning rate times a sum of gradients.
    """
    if len(optimizers) != 1 or type(optimizers[0]) is not torch.optim.SGD:
        return None, 0.0
    groups = optimizers[0].param_groups
    rates = {float(group["lr"]) for group in groups}
    momenta = {float(group["momentum"]) for group in groups}
    if len(rates) != 1 or len(momenta) != 1 or any(group["maximize"] for group in groups):
        return None, 0.0
    return rates.pop(), momenta.pop()


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
        self._keep = keep
        self._kept: dict[int, list[dict[str, Any]]] = {}
        self._pending: dict[int, list[dict[str, Any]]] = {}
        self._busy = False
        self._take(optimizers)

    def _take(self, optimizers: Sequence[Optimizer]) -> None:  # before any step of theirs
        self._optimizers = list(optimizers)
        self._states = [OptimizerState(optimizer, shared) for optimizer, shared in with_wrapped(optimizers)]
        for state in self._states:
            state.take_options()
            if self._keep:
                state.refuse_keeping()
        self.lr, self.momentum = client_learning_rate(self._optimizers)

    def follow(self, optimizers: Sequence[Optimizer]) -> bool:
        """Takes the optimizers that callbacks may have put in the trainer; returns whether they are others.

        States that clients have kept stay with them if the kinds are the same.
        """
        if len(optimizers) == len(self._optimizers) and all(map(is_, optimizers, self._optimizers)):
            return False
        if list(map(type, optimizers)) != list(map(type, self._optimizers)):
            self._kept, self._pending = {}, {}
        self._take(optimizers)
        return True

    def begin_round(self) -> None:
        """Takes the groups' options, as schedulers left them, as every client's starting point."""
        for state in self._states:
            state.take_options()
        self.lr, self.momentum = client_learning_rate(self._optimizers)
        self._pending = {}

    def present_lr(self) -> float | None:
        """The learning rate at the moment, which schedulers change within a visit."""
        return client_learning_rate(self._optimizers)[0]

    def take_aside(self, client_id: int) -> list[dict[str, Any]] | None:
        """The state that :meth:`end_client` set aside, to be carried to another process."""
        return self._pending.pop(client_id, None)

    def put_aside(self, client_id: int, state: list[dict[str, Any]] | None) -> None:
        """Takes what :meth:`take_aside` returned in another process."""
        if state is not None:
            self._pending[client_id] = state

    def restore(self) -> None:
        """Empties the state and puts the options of the round's start back."""
        for state in self._states:
            state.restore()
        self._busy = False

    def begin_client(self, client_id: int) -> None:
        """A fresh optimizer, or the client's own from its last round."""
        self.restore()
        self._busy = True
        for state, kept in zip(self._states, self._kept.get(client_id, []), strict=False):
            state.load(kept)

    def end_client(self, client_id: int) -> None:
        """Sets the client's state aside until its round counts."""
        if self._keep:
            self._pending[client_id] = [state.save() for state in self._states]

    def commit(self, client_ids: Sequence[int]) -> None:
        """The round counted for these clients."""
        for client_id in client_ids:
            if client_id in self._pending:
                self._kept[client_id] = self._pending[client_id]
        self._pending = {}

    def state_dict(self) -> dict[int, Any]:
        """Kept states by client id."""
        return dict(self._kept)

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Restores what :meth:`state_dict` returned, unless nothing is to be kept."""
        self._kept = {int(client): states for client, states in state.items()} if self._keep else {}

    def groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """An optimizer's options per parameter group, without what a client in training has changed."""
        if self._busy:
            return next(state.options for state in self._states if state.optimizer is optimizer)
        return [group_options(group) for group in optimizer.param_groups]


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
