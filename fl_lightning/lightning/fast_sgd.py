# SPDX-License-Identifier: Apache-2.0
"""Steps of plain SGD without what torch.optim spends around them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


class FastSGD:
    """Stands in for an optimizer whose next step is plain SGD, and calls the optimizer itself otherwise.

    Most federated clients run ``torch.optim.SGD`` without momentum on small models. There ``zero_grad`` and ``step``
    spend several times as long on hooks, profiler records and argument checks as on arithmetic, once per local batch.
    The arithmetic here is the same, operation by operation, so the weights have the same bits. Each step decides anew,
    because schedulers, callbacks and the module may change options of groups at any time.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.follow(optimizer)

    def follow(self, optimizer: Optimizer) -> None:
        """Stands in for another optimizer from now on."""
        self.wrapped = optimizer
        self._eligible = type(optimizer) is SGD

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        if not self._eligible or "zero_grad" in vars(self.wrapped):
            self.wrapped.zero_grad()
            return
        for group in self.wrapped.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self) -> None:
        """Takes one step along the gradients that are there."""
        optimizer = self.wrapped
        groups = optimizer.param_groups
        if not self._eligible or not _unobserved(optimizer) or not all(map(_plain, groups)):
            optimizer.step()
            return
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # torch.no_grad() takes as long as the step of a small layer
        try:
            for group in groups:
                params, grads = group["params"], [g for p in group["params"] if (g := p.grad) is not None]
                if len(grads) < len(params):
                    params = [parameter for parameter in params if parameter.grad is not None]
                if not params:
                    continue
                if group["weight_decay"] != 0:
                    grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
                torch._foreach_add_(params, grads, alpha=-group["lr"])
        finally:
            torch._C._set_grad_enabled(enabled)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn if no step came before theirs


def _plain(group: dict[str, Any]) -> bool:
    return (
        group["momentum"] == 0
        and not group["maximize"]
        and not group["differentiable"]
        and not group["fused"]
        and type(group["lr"]) is float
    )


def _unobserved(optimizer: Optimizer) -> bool:
    """Whether no hook runs at steps and ``step`` is torch's own, perhaps wrapped by a scheduler."""
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    own = vars(optimizer).get("step")
    return own is None or getattr(own, "__wrapped__", None) is type(optimizer).step
