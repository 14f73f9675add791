# SPDX-License-Identifier: Apache-2.0
"""Client optimizers: fresh for every client, or kept per client across rounds."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

OptimizerState = Literal["reset", "keep"]


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

    The objects stay the same, because learning-rate schedulers hold on to them. For a new client their state is empty
    and every option of a parameter group is what it was when the round began. Optimizers from outside ``torch.optim``
    may keep state in attributes: those are put back to what they were before the first step.

    Args:
        optimizers: the trainer's optimizers, before any step.
        keep: give a client back the state that it ended its last round with.
    """

    def __init__(self, optimizers: Sequence[Optimizer], keep: bool) -> None:
        self._optimizers = list(optimizers)
        self._keep = keep
        self._kept: dict[int, list[dict[int, Any]]] = {}
        self._pending: dict[int, list[dict[int, Any]]] = {}
        self._foreign = [_attributes(o) if not _is_torch_optimizer(o) else None for o in self._optimizers]
        self.begin_round()

    def begin_round(self) -> None:
        """Takes the groups' options, as schedulers left them, as every client's starting point."""
        self._options = [[_options(group) for group in o.param_groups] for o in self._optimizers]
        self._pending = {}

    def restore(self) -> None:
        """Empties the state and puts the options of the round's start back."""
        for optimizer, groups, foreign in zip(self._optimizers, self._options, self._foreign, strict=True):
            if foreign is not None:
                vars(optimizer).update(_copied(foreign, optimizer))
            optimizer.state = defaultdict(dict)
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(_copy_options(options))

    def begin_client(self, client_id: int) -> None:
        """A fresh optimizer, or the client's own from its last round."""
        self.restore()
        for optimizer, states in zip(self._optimizers, self._kept.get(client_id, []), strict=False):
            parameters = _parameters(optimizer)
            for index, state in states.items():
                parameter = parameters[index]
                optimizer.state[parameter] = {k: _to(v, parameter.device) for k, v in state.items()}

    def end_client(self, client_id: int) -> None:
        """Sets the client's state aside until its round counts."""
        if self._keep:
            self._pending[client_id] = [
                {i: {k: _to(v, torch.device("cpu")) for k, v in o.state[p].items()}
                 for i, p in enumerate(_parameters(o)) if p in o.state}
                for o in self._optimizers
            ]  # fmt: skip

    def commit(self, client_ids: Sequence[int]) -> None:
        """The round counted for these clients."""
        for client_id in client_ids:
            if client_id in self._pending:
                self._kept[client_id] = self._pending[client_id]
        self._pending = {}

    @property
    def nbytes(self) -> int:
        """Bytes held for clients between rounds."""
        tensors = (v for os in self._kept.values() for o in os for s in o.values() for v in s.values())
        return sum(v.numel() * v.element_size() for v in tensors if isinstance(v, Tensor))

    def state_dict(self) -> dict[int, Any]:
        """Kept states by client id."""
        return dict(self._kept)

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._kept = {int(client): states for client, states in state.items()}


def _is_torch_optimizer(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return _copy_options({name: value for name, value in group.items() if name != "params"})


def _copy_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in options.items()}


def _to(value: Any, device: torch.device) -> Any:
    # A scalar step counter may live on the CPU beside parameters on an accelerator: leave those where they are.
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().clone() if value.dim() == 0 else value.detach().to(device, copy=True)


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "defaults", "state") and not name.startswith("_") and not callable(value)
    }
    return _copied(own, optimizer)


def _copied(attributes: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    # Parameters are shared, not copied: the memo tells deepcopy that it has them already.
    memo = {id(p): p for p in _parameters(optimizer)}
    return copy.deepcopy(attributes, memo)
