# SPDX-License-Identifier: Apache-2.0
"""Optimizers that treat every number for itself, and therefore the stacked parameters of several clients as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fl_lightning.executors._levels import UnfitError
from fl_lightning.quick_sgd import QuickSGD

ELEMENTWISE = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
"""Optimizers whose step on a number depends on this number's own gradients and nothing else in the tensor."""


def optimizer_obstacle(optimizers: Sequence[Optimizer]) -> str | None:
    """Why a step on stacked parameters may differ from the clients' own steps, or ``None``.

    Types must match exactly: a subclass may do anything. Adafactor (means over rows and columns) and Muon (matrices)
    would run on stacked parameters, and give wrong results.
    """
    if len(optimizers) != 1:
        return f"it needs one optimizer, and the module has {len(optimizers)}"
    optimizer = optimizers[0]
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        return f"{name} is not known to treat every number for itself; {', '.join(t.__name__ for t in ELEMENTWISE)} are"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} has differentiable=True"
    own = vars(optimizer).get("step")
    hooks = (
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    # Schedulers wrap step in order to count; everything else wants to see single clients.
    if any(hooks) or (own is not None and getattr(own, "__wrapped__", None) is not type(optimizer).step):
        return f"somebody waits for the steps of {name} (a hook, or another step function)"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for g in optimizer.param_groups for p in g["params"]):
        return "parameters have gradient hooks"
    return None


class StackedOptimizer:
    """A client optimizer's twin on parameters with a leading client dimension.

    Args:
        template: the client's optimizer as it is before the first step. Its options count at every step, since
            schedulers and the module may change them.
        parameters: the module's parameters.
        stacked: the clients' values of each of them, ``[k, *shape]``; steps change them in place.
    """

    def __init__(self, template: Optimizer, parameters: Sequence[nn.Parameter], stacked: Sequence[Tensor]) -> None:
        self._template = template
        self._stacked = {id(p): tensor for p, tensor in zip(parameters, stacked, strict=True)}
        self._optimizer = type(template)([{"params": some} for some in self._grouped()])  # type: ignore[call-arg]
        self._optimizer.state.clear()
        self._quick = QuickSGD(self._optimizer)
        for group in template.param_groups:
            for parameter in group["params"]:
                leaf, state = self._stacked.get(id(parameter)), template.state.get(parameter)
                if leaf is not None and state:
                    self._optimizer.state[leaf] = {k: _spread(v, parameter, leaf) for k, v in state.items()}

    def _grouped(self) -> list[list[Tensor]]:
        # A parameter without gradients may be in the optimizer, and one with gradients may not.
        return [[self._stacked[id(p)] for p in g["params"] if id(p) in self._stacked] for g in self._groups]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._template.param_groups

    @property
    def ignores_zeros(self) -> bool:
        """A gradient of zero leaves a parameter as it is, as no gradient does."""
        return type(self._template) is torch.optim.SGD and all(
            group["momentum"] == 0 and type(group["weight_decay"]) in (int, float) and group["weight_decay"] == 0
            for group in self._groups
        )

    @contextmanager
    def same_options(self, parties: int) -> Iterator[Callable[[], None]]:
        """Around the training steps of several parties, which may change options such as the learning rate.

        Args:
            parties: their number; a single one may do what it likes.

        Yields:
            A function to be called before each of them.

        Raises:
            UnfitError: they do not leave the same options behind.
        """
        groups = self._groups
        before, after = [dict(group) for group in groups], list[list[dict[str, Any]]]()

        def again() -> None:
            if parties > 1:
                after.append([dict(group) for group in groups])
                for group, options in zip(groups, before, strict=True):
                    group.update(options)

        yield again
        # The first entry is from before the first party.
        if parties > 1 and not all(_equal(options, groups) for options in after[1:]):
            raise UnfitError("training_step changes the optimizer's options, and not all clients are at the same batch")

    def keep(self, number: int) -> list[Tensor]:
        """Goes on with the first clients alone.

        Returns:
            Their parameters ``[number, *shape]``, views of those there were.
        """
        before, state = self._stacked, self._optimizer.state
        self._stacked = {key: leaf[:number] for key, leaf in before.items()}
        for group, some in zip(self._optimizer.param_groups, self._grouped(), strict=True):
            group["params"] = some
        for key, leaf in self._stacked.items():
            old = before[key]
            if old in state:
                state[leaf] = {k: v[:number] if _is_stacked(v, old) else v for k, v in state.pop(old).items()}
        return list(self._stacked.values())

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One step of all clients; parameters without a gradient are left alone."""
        for leaf, gradient in zip(self._stacked.values(), gradients, strict=True):
            leaf.grad = gradient
        for group, template in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update({name: value for name, value in template.items() if name != "params"})
        self._quick.step()
        self._template._opt_called = True  # type: ignore[attr-defined]  # schedulers warn if no step came before theirs


def _equal(some: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> bool:
    return all(
        one.keys() == other.keys() and all(one[n] is other[n] or bool(one[n] == other[n]) for n in one if n != "params")
        for one, other in zip(some, others, strict=True)
    )


def _is_stacked(value: Any, leaf: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == leaf.shape


def _spread(value: Any, parameter: Tensor, leaf: Tensor) -> Any:
    """What an optimizer has for a parameter before its first step, for each of the stacked clients."""
    if not isinstance(value, Tensor):
        return value
    return value.expand_as(leaf).clone() if value.shape == parameter.shape else value.clone()
