# SPDX-License-Identifier: Apache-2.0
"""Gradients of several clients in one pass: ``vmap`` of ``grad``, with gaps where the loss needs no parameter.

``torch.func.grad`` gives zeros for parameters that the loss does not depend on, where a client's own backward pass
gives none at all, which optimizers treat differently. And ``torch.func`` spends a third of a millisecond per call on
taking nested arguments apart, as much as small models need for everything else. So this goes through the same two
levels by hand, with the functions that ``torch.func`` itself calls; where a release of torch lacks them, ``vmap`` and
autograd do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap


class UnfitError(Exception):
    """Clients cannot be trained together; the message says why."""


Loss = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, list[Tensor]]]
"""From parameters and other tensors to a loss and further results without a graph."""

_NAMES = (
    "_add_batch_dim", "_grad_decrement_nesting", "_grad_increment_nesting", "_remove_batch_dim", "_unwrap_for_grad",
    "_vmap_decrement_nesting", "_vmap_increment_nesting", "_wrap_for_grad", "set_inplace_requires_grad_allowed",
)  # fmt: skip


def _by_hand() -> Any:
    functions = getattr(torch._C, "_functorch", None)
    return functions if all(hasattr(functions, name) for name in _NAMES) else None


def gradients(
    loss: Loss, parameters: Sequence[Tensor], others: Sequence[Tensor]
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients and results of ``g`` clients.

    Args:
        loss: called once, with tensors that stand for those of a single client.
        parameters: ``[g, *shape]`` each, without a graph.
        others: ``[g, ...]`` each.

    Returns:
        The gradients ``[g, *shape]``, ``None`` where the losses do not depend on a parameter; the results ``[g, ...]``.
    """
    c = _by_hand()
    if c is None:
        return _with_autograd(loss, parameters, others)
    _load_decompositions()
    number = len(parameters[0])
    outer = c._vmap_increment_nesting(number, "error")
    try:
        inner = c._grad_increment_nesting()
        try:
            leaves = [c._wrap_for_grad(c._add_batch_dim(p, 0, outer), inner) for p in parameters]
            _require_gradients(c, leaves)
            given = [c._wrap_for_grad(c._add_batch_dim(t, 0, outer), inner) for t in others]
            with torch.enable_grad():
                value, results = loss(leaves, given)
                found = torch.autograd.grad(value, leaves, allow_unused=True)
            unwrapped = [None if g is None else c._unwrap_for_grad(g, inner) for g in found]
            results = [c._unwrap_for_grad(r, inner) for r in results]
        finally:
            c._grad_decrement_nesting()
        return (
            [None if g is None else c._remove_batch_dim(g, outer, number, 0) for g in unwrapped],
            [c._remove_batch_dim(r, outer, number, 0) for r in results],
        )
    finally:
        c._vmap_decrement_nesting()


@cache
def _load_decompositions() -> None:
    """The first ``vmap`` of a process brings what batched operators need."""
    vmap(torch.neg)(torch.zeros(1))


def _require_gradients(functions: Any, leaves: Sequence[Tensor]) -> None:
    functions.set_inplace_requires_grad_allowed(True)
    try:
        for leaf in leaves:
            leaf.requires_grad_()
    finally:
        functions.set_inplace_requires_grad_allowed(False)


def _with_autograd(
    loss: Loss, parameters: Sequence[Tensor], others: Sequence[Tensor]
) -> tuple[list[Tensor | None], list[Tensor]]:
    leaves = [p.detach().requires_grad_() for p in parameters]
    values, results = vmap(lambda own, given: loss(own, given))(leaves, list(others))
    found = torch.autograd.grad(values, leaves, torch.ones_like(values), allow_unused=True)
    return list(found), [result.detach() for result in results]
