# SPDX-License-Identifier: Apache-2.0
"""Forward and backward pass of a loss as one list of ATen calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

_DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class CannotPlanError(Exception):
    """A local step that cannot be repeated from a trace; the message says why."""


def failed(what: str, error: Exception) -> CannotPlanError:
    """An error of PyTorch as a reason, with its first line."""
    first = next(iter(str(error).splitlines()), "")
    return CannotPlanError(f"{what}: {type(error).__name__}: {first}")


@dataclass(frozen=True)
class Trace:
    """ATen calls in the order in which PyTorch makes them for a loss and its gradients.

    Attributes:
        graph: placeholders for the inputs, calls, and an output: first what the function returns, then the gradients.
        constants: tensors that the function made of numbers, by name.
        returns: how many of the outputs the function returns.
        sources: of every node that shows the memory of another, which one; seen when the calls were made, because not
            all schemas tell.
        trained: places of the inputs that the gradients are of, in their order.
        untouched: places of inputs that require gradients and on which the loss does not depend.
    """

    graph: fx.Graph
    constants: Mapping[str, Tensor]
    sources: Mapping[fx.Node, fx.Node]
    returns: int
    trained: tuple[int, ...]
    untouched: tuple[int, ...]

    def base(self, node: fx.Node) -> fx.Node:
        """The node that made the memory of what another gives."""
        return self._bases[node]

    @cached_property
    def _bases(self) -> dict[fx.Node, fx.Node]:
        bases: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            source = self.sources.get(node)
            bases[node] = node if source is None else bases[source]
        return bases

    @cached_property
    def changed(self) -> frozenset[fx.Node]:
        """Nodes whose memory is written after they were made."""
        return frozenset(self._bases[source] for node in self.graph.nodes for source in written_arguments(node))

    @property
    def changed_inputs(self) -> tuple[int, ...]:
        """Places of inputs that the calls write into, as far as their schemas tell."""
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        return tuple(place for place, node in enumerate(placeholders) if node in self.changed)


@cache
def begin_autograd() -> None:
    """Lets autograd look for devices now.

    It does so in the first backward pass of a process, and starts a thread for each device. In a trace it finds some
    that the machine does not have. A process with such threads cannot be copied into workers that train.
    """
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def trace(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], differentiate: bool = True) -> Trace:
    """Traces a function and the gradients of its loss; runs both, on copies of the inputs.

    Args:
        function: returns tensors. The one that requires gradients is the loss.
        inputs: what it is called with; those that require gradients are leaves.
        differentiate: False traces the function alone.

    Raises:
        CannotPlanError: what the function does depends on values of tensors, or not exactly one tensor that it returns
            requires gradients.
    """
    begin_autograd()
    copies = [_copy(tensor) for tensor in inputs]
    wanted = [place for place, tensor in enumerate(inputs) if tensor.requires_grad and differentiate]
    trained: list[int] = []
    returns = 0

    def with_gradients(*given: Tensor) -> list[Tensor]:
        nonlocal returns
        returned = list(function(*given))
        returns = len(returned)
        if not differentiate:
            return [tensor.detach() for tensor in returned]
        losses = [tensor for tensor in returned if tensor.requires_grad]
        if not losses:
            raise CannotPlanError("its loss has no gradients")
        if len(losses) > 1:
            raise CannotPlanError("it keeps tensors with their graphs")
        found = torch.autograd.grad(losses[0], [given[place] for place in wanted], allow_unused=True)
        gradients = {place: gradient for place, gradient in zip(wanted, found, strict=True) if gradient is not None}
        trained.extend(gradients)
        return [tensor.detach() for tensor in returned] + list(gradients.values())

    with torch.set_grad_enabled(differentiate):
        module = make_fx(with_gradients, tracing_mode="real")(*copies)
    for node in module.graph.nodes:
        _check(node)
    names = [str(node.target) for node in module.graph.nodes if node.op == "get_attr"]
    constants = {name: getattr(module, name) for name in names}
    untouched = tuple(place for place in wanted if place not in trained)
    shown = _Shown(module)
    with torch.no_grad():
        shown.run(*(_copy(tensor) for tensor in inputs))
    return Trace(module.graph, constants, shown.sources, returns, tuple(trained), untouched)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a call writes into, as its schema tells."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    named = {a.name: node.kwargs.get(a.name) for a in node.target._schema.arguments}
    named |= dict(zip(named, node.args, strict=False))
    written = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    found = [named[name] for name in written]
    return [
        n for value in found for n in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(n, fx.Node)
    ]


class _Shown(fx.Interpreter):
    """Makes the calls of a trace once more and finds out who shows whose memory.

    Attributes:
        sources: of every node that shows another's.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.sources: dict[fx.Node, fx.Node] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Makes one call.

        Raises:
            CannotPlanError: it gives memory of others and memory of its own.
        """
        made = super().run_node(n)
        if n.op != "call_function":
            return made
        owners = {place: source for source in n.all_input_nodes for place in _places(self.env[source])}
        found = [owners.get(place) for place in _places(made)]
        written = written_arguments(n)
        if any(found):
            if not all(found) or len({id(source) for source in found}) > 1:
                raise CannotPlanError(f"{n.target} gives a view and something else")
            self.sources[n] = written[0] if written else found[0]  # type: ignore[assignment]
        return made


def _places(value: Any) -> list[int]:
    """Where the memory of tensors begins that hold something."""
    if isinstance(value, (list, tuple)):
        return [place for part in value for place in _places(part)]
    if not isinstance(value, Tensor) or value.numel() == 0:
        return []
    return [value.untyped_storage().data_ptr()]


def _copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def _check(node: fx.Node) -> None:
    if node.op != "call_function" or node.target is operator.getitem:
        return
    if not isinstance(node.target, OpOverload):
        raise CannotPlanError(f"it calls {getattr(node.target, '__name__', node.target)}, which is no ATen operation")
    if any(tag in node.target.tags for tag in _DATA_DEPENDENT):
        raise CannotPlanError(f"what {node.target} gives depends on the values of tensors")
