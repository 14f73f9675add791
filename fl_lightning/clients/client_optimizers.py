# SPDX-License-Identifier: Apache-2.0
"""Client optimizers: fresh for every client, or of each client's own across rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from operator import is_
from typing import Any

from torch.optim import Optimizer

from fl_lightning.core.errors import ModuleError
from fl_lightning.lightning.module.changes import on_cpu, read, written
from fl_lightning.lightning.module.objects import Object
from fl_lightning.lightning.module.snapshot import Snapshot, known_in
from fl_lightning.lightning.names import Trainer
from fl_lightning.lightning.optimizers import client_learning_rate, with_wrapped

_SCHEDULED = frozenset(
    {"lr", "initial_lr", "momentum", "betas", "weight_decay", "max_lr", "min_lr", "swa_lr", "params"}
)
"""Options that learning-rate schedulers change, and what is no option."""


class ClientOptimizers:
    """Makes the trainer's optimizers behave like a new one for each client, or ``keep`` what each one's left.

    The objects stay the same, because learning-rate schedulers refer to them. Each client starts with the state of a
    new optimizer, and with options of parameter groups and schedulers from the start of the round. Optimizers from
    outside ``torch.optim`` may keep more state in attributes and may wrap other optimizers.

    Limit: an optimizer that copies parameters in its constructor keeps the copy from the start of the fit. No optimizer
    of ``torch.optim`` does this.
    """

    def __init__(self, trainer: Trainer, keep: bool) -> None:
        self._trainer, self._keeps = trainer, keep
        self._client_states: dict[int, Mapping[str, Any]] = {}
        self._pending: dict[int, Mapping[str, Any]] = {}
        self._roots: list[Any] = []
        self._snapshot = Snapshot((), {})
        self._take()

    def _take(self) -> None:  # before any step of theirs
        self._optimizers = list(self._trainer.optimizers)
        self.all = with_wrapped(self._optimizers)
        self._begin()

    def look(self) -> Snapshot:
        """The optimizers and schedulers that the trainer has now, as they are now."""
        schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        roots = [*self._trainer.optimizers, *schedulers]
        if not _are(roots, self._roots) or self._snapshot.changed():
            kinds: dict[str, list[Any]] = {"optimizer": self._trainer.optimizers, "scheduler": schedulers}
            named = [(f"{kind} {place}", root) for kind, found in kinds.items() for place, root in enumerate(found)]
            self._roots, self._snapshot = roots, Snapshot(named, known_in(self._trainer.lightning_module))
        return self._snapshot

    def follow(self) -> bool:
        """Takes the optimizers that callbacks may have put in the trainer; returns whether they are others.

        States of clients stay with them if the kinds are the same.
        """
        optimizers = self._trainer.optimizers
        if _are(optimizers, self._optimizers):
            return False
        if list(map(type, optimizers)) != list(map(type, self._optimizers)):
            self._client_states, self._pending = {}, {}
        self._take()
        return True

    def begin_round(self) -> None:
        """Takes what optimizers and schedulers hold now as every client's starting point."""
        self._begin()
        self._pending = {}

    def _begin(self) -> None:
        self.look()
        self._groups = [len(optimizer.param_groups) for optimizer in self.all]
        self.lr, self.momentum = client_learning_rate(self._optimizers)

    def settable(self, group: Mapping[str, Any]) -> Set[str]:
        """The options of a group that nobody but schedulers and the module sets: optimizers may count in others."""
        return (group.keys() if all(map(_is_torch, self.all)) else group.keys() & _SCHEDULED) - {"params"}

    def present_lr(self) -> float | None:
        """The learning rate at the moment, which schedulers change within a visit."""
        return client_learning_rate(self._optimizers)[0]

    def pop_pending(self, client_id: int) -> Mapping[str, Any] | None:
        """The state that :meth:`end_client` set aside, to be carried to another process."""
        return self._pending.pop(client_id, None)

    def set_pending(self, client_id: int, state: Mapping[str, Any] | None) -> None:
        """Takes what :meth:`pop_pending` returned in another process."""
        if state is not None:
            self._pending[client_id] = state

    def restore(self) -> None:
        """Puts optimizers and schedulers back to the round's start."""
        found = [len(optimizer.param_groups) for optimizer in self.all]
        self._snapshot.restore()
        for optimizer, number, before in zip(self.all, found, self._groups, strict=True):
            if number != before:
                raise ModuleError(
                    f"{type(optimizer).__name__} must keep its {before} parameter groups during a fit, found {number}: "
                    "give all to it in configure_optimizers"
                )

    def begin_client(self, client_id: int) -> None:
        """A fresh optimizer, or the client's own from its last round."""
        self.restore()
        saved = self._client_states.get(client_id)
        if not saved:
            return
        groups = {id(group) for optimizer in self.all for group in optimizer.param_groups}
        device = self._trainer.lightning_module.device
        for found, form, values in read(saved, self._snapshot, device).changes:
            if id(found.value) in groups:  # what schedulers set is everybody's
                own = {n: v for n, v in values[0].items() if n not in _SCHEDULED}
                values = [own | {n: v for n, v in found.content.items() if n in _SCHEDULED}]
            found.apply(form, values)

    def end_client(self, client_id: int) -> None:
        """Sets the client's state aside until its round counts."""
        if not self._keeps:
            return
        own = written(self._snapshot, [found for found in self._snapshot.changed() if self._is_kept(found)], {})
        if own.lost:
            lost = "; ".join(f"{name} ({why})" for name, why in own.lost.items())
            raise ModuleError(f"client_optimizer_state='keep' cannot keep {lost}: use 'reset'")
        for node in own.plain.get("nodes", ()):
            if node[0] == "tensor" and node[1].dim() > 0:  # a step counter may lie elsewhere than the parameters
                node[2] = True
        self._pending[client_id] = on_cpu(own.plain)

    def _is_kept(self, found: Object) -> bool:
        kind, _, place = found.name.partition(" ")
        return kind == "optimizer" and (found.path.startswith(".state") or not _is_torch(self._optimizers[int(place)]))

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


def _are(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(objects) == len(others) and all(map(is_, objects, others))


def _is_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")
