# SPDX-License-Identifier: Apache-2.0
"""What takes the place of a graph that TorchDynamo has found: a program, and its comparison with PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from fl_lightning.clients.planned.program import CannotPlanError, program_of, with_gradients

_COMPARED = ("what a step returns or logs", "a gradient", "a tensor that a step changes", "the random generator")


class Plan:
    """Computes a loss and its gradients; called with the inputs of the graph. The first call is compared.

    Attributes:
        size: operations of a call.
        gradients: of the last call, one per parameter.
        wrong: what was not the same as PyTorch's, in words.
        last: inputs of the last call; ``None`` once it was compared.

    Raises:
        CannotPlanError: the graph cannot be repeated.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
        for node in graph.graph.nodes:
            # Such a tensor decides about the dtype of a result; a number does not.
            if node.op == "placeholder" and getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", True):
                raise CannotPlanError("TorchDynamo would make a tensor of a number or an array of NumPy")
        own = {id(parameter) for parameter in parameters}
        for value in inputs:
            if type(value) not in (Tensor, nn.Parameter) or value.device.type != "cpu":
                raise CannotPlanError(f"it computes with a {type(value).__name__} from outside")
            if value.requires_grad and id(value) not in own:
                raise CannotPlanError("it needs the gradient of a tensor that no optimizer holds")
        self._graph = graph
        self._program, self.size, places = program_of(graph, inputs)
        order = {id(inputs[place]): number for number, place in enumerate(places)}
        self._places = [order.get(id(parameter)) for parameter in parameters]
        self.gradients: list[Tensor | None] = []
        self.wrong: str | None = None
        self.last: tuple[Tensor, ...] | None = None
        self._begun = False

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """What the graph returns, without its own graph."""
        if self._begun:
            self.last = inputs
            with torch.no_grad():
                results: tuple[Sequence[Tensor], Sequence[Tensor]] = self._program(*inputs)
        else:
            self._begun = True
            results = self.compare(inputs)
        returned, found = results
        self.gradients = [None if place is None else found[place] for place in self._places]
        return returned

    def compare(self, inputs: Sequence[Tensor], keep: bool = True) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Runs the program and then PyTorch, notes in :attr:`wrong` what differs, and gives PyTorch's results.

        Args:
            inputs: as for a call.
            keep: False puts back all that PyTorch has changed.
        """
        before, state = [tensor.detach().clone() for tensor in inputs], torch.get_rng_state()
        with torch.no_grad():
            returned, found = self._program(*inputs)
        ours = (returned, [g.clone() for g in found], [t.detach().clone() for t in inputs], [torch.get_rng_state()])
        _put_back(inputs, before, state)
        returned, gradients = with_gradients(self._graph, inputs)
        found = [gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients.values()]
        theirs = (returned, found, [tensor.detach() for tensor in inputs], [torch.get_rng_state()])
        for name, mine, right in zip(_COMPARED, ours, theirs, strict=True):
            if len(mine) != len(right) or not all(map(_same_bits, mine, right)):
                self.wrong = self.wrong or f"{name} from a plan would differ from PyTorch's"
        if not keep:
            _put_back(inputs, before, state)
        return returned, found


def _put_back(tensors: Sequence[Tensor], before: Sequence[Tensor], state: Tensor) -> None:
    for tensor, old in zip(tensors, before, strict=True):
        if not _same_bits(tensor, old):  # what is read alone must not look as if it had been written
            tensor.detach().copy_(old)
    torch.set_rng_state(state)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.dtype.itemsize, torch.uint8)
    return torch.equal(*(tensor.detach().contiguous().view(-1).view(kind) for tensor in (a, b)))
