# SPDX-License-Identifier: Apache-2.0
"""One training step of several clients in one pass, through ``torch.func``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torchmetrics import Metric

from fl_lightning._lightning import LightningModule
from fl_lightning.algorithms.base import ClientRule, LocalWork
from fl_lightning.algorithms.fedprox import ProximalTerm
from fl_lightning.executors._levels import UnfitError, gradients
from fl_lightning.executors._stacked_logs import Logged
from fl_lightning.local import LocalTrainer
from fl_lightning.submodules import outside_metrics, submodules
from fl_lightning.updates import ParamLayout


@dataclass(frozen=True)
class StepResult:
    """What a step of ``g`` clients gave.

    Attributes:
        gradients: per parameter ``[g, *shape]``, or ``None`` where the loss does not depend on it.
        losses: ``[g]``.
        buffers: per buffer ``[g, *shape]``, as the step left them.
        logged: calls of ``self.log``, in order.
    """

    gradients: list[Tensor | None]
    losses: Tensor
    buffers: list[Tensor]
    logged: list[Logged]


class StackedStep:
    """The module's training step as a function of parameters and buffers.

    Args:
        module: the module.
        local: calls its ``training_step``.
        rule: the client rule: plain, or one whose loss term is a function of the parameters.
        parameters: the module's parameters, in flat order.
        layout: the flat order.
        params: ``[n]`` the global parameters.
    """

    def __init__(
        self,
        module: LightningModule,
        local: LocalTrainer,
        rule: ClientRule,
        parameters: list[nn.Parameter],
        layout: ParamLayout,
        params: Tensor,
    ) -> None:
        self._module, self._local, self._rule = module, local, rule
        self._parameters, self._layout, self._params = parameters, layout, params
        places = {id(p): place for place, p in enumerate(parameters)}
        self._parameter_slots: list[tuple[dict[str, Any], str, Tensor, int]] = [
            (part._parameters, key, value, places[id(value)])
            for part in module.modules()
            for key, value in part._parameters.items()
            if value is not None and id(value) in places
        ]
        buffers: dict[int, Tensor] = {}
        self._buffer_slots: list[tuple[dict[str, Any], str, Tensor, int]] = []
        for _, part in outside_metrics(submodules(module)):
            for key, value in part._buffers.items():
                if value is not None:
                    buffers.setdefault(id(value), value)
                    self._buffer_slots.append((part._buffers, key, value, list(buffers).index(id(value))))
        self.buffers = list(buffers.values())
        self._calls: list[tuple[str, Any, bool, tuple[Any, ...], dict[str, Any]]] = []
        self._values: list[Tensor] = []
        self._tree: TreeSpec | None = None
        self._constants: dict[int, Any] = {}
        self._index = 0

    # ---- the step

    def together(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], batch: Any, index: int) -> StepResult:
        """A step of ``g`` clients.

        Args:
            parameters: the clients' parameters ``[g, *shape]``.
            buffers: their buffers ``[g, *shape]``.
            batch: one batch whose tensors have a first dimension ``g`` more.
            index: place of the batch in the clients' pass over their data.

        Raises:
            UnfitError: the module does something that a pass over several clients cannot.
        """
        found, results = gradients(self._loss, parameters, [*buffers, *self._take_apart(batch, index)])
        return self._result(found, results)

    def alone(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], batch: Any, index: int) -> StepResult:
        """The step of one client, in the same form with ``g = 1``; nothing that is given has that dimension."""
        leaves = [p.detach().requires_grad_() for p in parameters]
        loss, results = self._loss(leaves, [*buffers, *self._take_apart(batch, index)])
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        return self._result(
            [None if g is None else g.unsqueeze(0) for g in found], [r.detach().unsqueeze(0) for r in results]
        )

    def _result(self, found: list[Tensor | None], results: list[Tensor]) -> StepResult:
        changed = results[1 : 1 + len(self.buffers)]
        values = results[1 + len(self.buffers) :]
        logged = [Logged(n, values[v] if stacked else v, stacked, a, k) for n, v, stacked, a, k in self._calls]
        return StepResult(found, results[0], changed, logged)

    def plain(self, batch: Any, buffers: Sequence[Tensor], index: int) -> tuple[Tensor, list[Tensor]]:
        """The module's own loss at its present parameters, and the buffers that this leaves; nothing is logged."""
        self._index, own = index, [buffer.clone() for buffer in buffers]
        try:
            for owner, key, _, place in self._buffer_slots:
                owner[key] = own[place]
            loss = self._with_term(self._local.own_loss(batch, index).reshape(()), self._parameters, batch)
            return loss, self._present_buffers()
        finally:
            for owner, key, value, _ in self._buffer_slots:
                owner[key] = value

    def _present_buffers(self) -> list[Tensor]:
        found = {place: owner[key].detach() for owner, key, _, place in self._buffer_slots}
        return [found[place] for place in range(len(self.buffers))]

    def _loss(self, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Loss, and without a graph: the loss again, the buffers afterwards, logged values."""
        module, number = self._module, len(self.buffers)
        # Steps may change buffers in place.
        buffers = [buffer.clone() for buffer in others[:number]]
        self._calls, self._values = [], []
        for slots, values in ((self._parameter_slots, parameters), (self._buffer_slots, buffers)):
            for owner, key, _, place in slots:
                owner[key] = values[place]
        shadow = module.__dict__.get("log")
        module.__dict__["log"] = self._log
        vars(module)["_current_fx_name"] = "training_step"
        try:
            batch = self._put_together(others[number:])
            output = self._local.training_output(batch, self._index)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise UnfitError("training_step must return one number with a gradient for every batch")
            loss = loss.reshape(())
            loss = self._with_term(loss, parameters, batch)
            return loss, [loss.detach(), *self._present_buffers(), *self._values]
        finally:
            vars(module)["_current_fx_name"] = None
            module.__dict__.pop("log")
            if shadow is not None:
                module.__dict__["log"] = shadow
            for owner, key, value, _ in (*self._parameter_slots, *self._buffer_slots):
                owner[key] = value

    def _with_term(self, loss: Tensor, parameters: Sequence[Tensor], batch: Any) -> Tensor:
        if type(self._rule) is ClientRule:
            return loss
        own: Any = list(parameters)
        work = LocalWork(-1, -1, self._module, self._layout, own, self._params, self._params, 0)
        term = self._rule.loss_term(work, batch, self._index)
        return loss if term is None else loss + term

    # ---- batches and logs

    def _take_apart(self, batch: Any, index: int) -> list[Tensor]:
        """The tensors of a batch; the rest is kept for :meth:`_put_together`."""
        self._index = index
        if type(batch) is list and all(isinstance(part, Tensor) for part in batch):
            self._tree = None
            return batch
        leaves, self._tree = tree_flatten(batch)
        self._constants = {place: leaf for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _put_together(self, tensors: Sequence[Tensor]) -> Any:
        leaves: list[Any] = list(tensors)
        if self._tree is None:
            return leaves
        for place, value in self._constants.items():
            leaves.insert(place, value)
        return tree_unflatten(leaves, self._tree)

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(v, Tensor) for v in (*args, *kwargs.values())):
            raise UnfitError(f"self.log({name!r}) has a tensor among its options")
        if isinstance(value, (Metric, Mapping)):
            raise UnfitError(f"self.log({name!r}) logs a {type(value).__name__}")
        is_tensor = isinstance(value, Tensor)
        self._calls.append((name, len(self._values) if is_tensor else value, is_tensor, args, kwargs))
        if is_tensor:
            self._values.append(value.detach())


def rule_obstacle(rule: ClientRule) -> str | None:
    """Why a client rule asks for clients one by one, or ``None``."""
    if type(rule) in (ClientRule, ProximalTerm):
        return None
    return f"{type(rule).__name__} takes part in local training, client by client"
