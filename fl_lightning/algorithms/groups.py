# SPDX-License-Identifier: Apache-2.0
"""The scores, labels and groups of samples, for methods that compare how a model treats groups of people.

For such methods the module defines ``federated_groups(batch)``. It returns, for the samples of a batch,

- ``scores`` ``[B]``: differentiable in the parameters; class 1 is predicted where they are positive, so logits;
- ``labels`` ``[B]``: 0 or 1;
- ``groups`` ``[B]``: the sensitive attribute, 0 or 1; with FCFL, FairReg and FedFB up to ``num_groups - 1``. It need
  not be among the inputs of the network.

    def federated_groups(self, batch):
        inputs, labels, groups = batch
        return self.net(inputs).squeeze(1), labels, groups

FCFL, FairReg and FairFed call it at the global model, in eval mode; FA calls it on every training batch; FedFB does
both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from fl_lightning.core.errors import ModuleError

METHOD = "federated_groups"

# Names of autograd's nodes without "Backward" and number.
_NEVER_NEGATIVE = {"Abs", "Exp", "Relu", "Sigmoid", "Softmax", "Softplus"}
_SAME_NUMBERS = {  # or some of them, or their limits
    "Alias", "Clamp", "Clone", "Expand", "Gather", "Index", "IndexSelect", "Max", "Permute", "ReshapeAlias", "Select",
    "Slice", "Split", "Squeeze", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip


class GroupScores(NamedTuple):
    """What ``federated_groups`` returns, checked: ``[B]`` scores, booleans for label 1, and numbers of the groups."""

    scores: Tensor
    positive: Tensor
    groups: Tensor

    @property
    def member(self) -> Tensor:
        """``[B]`` booleans for group 1."""
        return self.groups == 1


def group_scores(module: nn.Module, batch: Any, num_groups: int = 2) -> GroupScores:
    """The scores, labels and groups of a batch; raises ModuleError or ValueError if the module returned others."""
    name = f"{type(module).__name__}.{METHOD}"
    output = getattr(module, METHOD)(batch)
    if not isinstance(output, (tuple, list)) or len(output) != 3 or not all(isinstance(t, Tensor) for t in output):
        kinds = [type(part).__name__ for part in output] if isinstance(output, (tuple, list)) else type(output).__name__
        raise ModuleError(f"{name} must return tensors scores, labels and groups, found {kinds}")
    scores, labels, groups = output
    shapes = [list(part.shape) for part in output]
    if scores.dim() != 1 or shapes[1:] != [shapes[0]] * 2:
        raise ModuleError(f"{name} must return scores, labels and groups of one shape [B], found {shapes}")
    if not scores.is_floating_point():
        raise ModuleError(f"{name} must return floating-point scores, found {scores.dtype}")
    returned_by = _never_negative(scores)
    if returned_by is not None:
        raise ModuleError(
            f"{name} must return scores that are positive where class 1 is predicted and negative elsewhere (logits), "
            f"found what a {returned_by} returns, which is never negative: return what goes into it"
        )
    positive = _numbers(f"labels of {name}", labels, 2) == 1
    more = ". FCFL, FairReg and FedFB take more groups with num_groups"
    return GroupScores(scores, positive, _numbers(f"groups of {name}", groups, num_groups, more))


def _never_negative(scores: Tensor) -> str | None:
    """The name of the function that the scores come from if it gives no negative numbers, as softmax and sigmoid do."""
    node = scores.grad_fn
    while node is not None:
        name = node.name().split("Backward")[0]
        if name in _NEVER_NEGATIVE:
            return name.lower()
        if name not in _SAME_NUMBERS:
            return None
        node = node.next_functions[0][0]
    return None


def _numbers(what: str, values: Tensor, count: int, advice: str = "") -> Tensor:
    numbers = values.long()
    if not bool(((numbers == values) & (numbers >= 0) & (numbers < count)).all()):
        allowed = "0 or 1" if count == 2 else f"an integer from 0 to {count - 1}"
        raise ValueError(f"{what} must be {allowed}, found {sorted(set(values.tolist()))[:10]}{advice}")
    return numbers
