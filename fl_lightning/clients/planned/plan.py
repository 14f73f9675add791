# SPDX-License-Identifier: Apache-2.0
"""What takes the place of a graph that TorchDynamo has found: a program, and its comparison with PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from fl_lightning.clients.planned.program import CannotPlanError, program_of, with_gradients


class Plan:
    """Computes a loss and its gradients from the inputs of the graph, with PyTorch's bits or not at all."""

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
        self._graph, self._no_grad = graph, torch.no_grad()
        places = {id(value): place for place, value in enumerate(inputs)}
        self._wanted = [places.get(id(parameter)) for parameter in parameters]
        self._program = program_of(graph, inputs, self._wanted)
        self.gradients: Sequence[Tensor | None] = ()  # of the last call, one per parameter
        self.last: Sequence[Tensor] | None = inputs  # of the last call; None once it was compared
        self.compare()

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """What the graph returns, without its own graph."""
        self.last = inputs
        with self._no_grad:
            returned, self.gradients = self._program(*inputs)
        return returned  # type: ignore[no-any-return]

    def compare(self) -> None:
        """Computes the last call by the program and by PyTorch, which must agree; changes nothing."""
        inputs, self.last = self.last or (), None
        before, state = [tensor.detach().clone() for tensor in inputs], torch.get_rng_state()
        with torch.no_grad():
            returned, gradients = self._program(*inputs)
        ours = [t if t is None else t.detach().clone() for t in (*returned, *gradients, *inputs, torch.get_rng_state())]
        _put_back(inputs, before, state)
        returned, found = with_gradients(self._graph, inputs)
        same = all(map(_same_bits, ours, (*returned, *map(found.get, self._wanted), *inputs, torch.get_rng_state())))
        _put_back(inputs, before, state)
        if not same:
            raise CannotPlanError("what a plan computes would differ from PyTorch's bits")


def _put_back(tensors: Sequence[Tensor], before: Sequence[Tensor], state: Tensor) -> None:
    for tensor, old in zip(tensors, before, strict=True):
        if not _same_bits(tensor, old):  # what is read alone must not look as if it had been written
            tensor.detach().copy_(old)
    torch.set_rng_state(state)


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    return torch.equal(*(tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (a, b)))
