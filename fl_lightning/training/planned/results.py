# SPDX-License-Identifier: Apache-2.0
"""What a local step has computed, to be compared bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Results:
    """All that is to be the same with a plan and without.

    Attributes:
        loss: of the batch.
        gradients: one per parameter.
        held: copies of parameters and buffers.
        state: of the random generator.
        records: what was logged.
    """

    loss: Tensor | None
    gradients: Sequence[Tensor | None]
    held: Sequence[Tensor]
    state: Tensor
    records: Sequence[tuple[Any, ...]]

    @classmethod
    def of(
        cls, loss: Tensor | None, gradients: Sequence[Tensor | None], held: Sequence[Tensor], records: Sequence[Any]
    ) -> Results:
        """What is there now: what will change is copied."""
        copies = [tensor.detach().clone() for tensor in held]
        return cls(loss, list(gradients), copies, torch.get_rng_state(), list(records))

    def difference(self, other: Results) -> str | None:
        """The first thing that is not the same, in words; ``None`` if all is."""
        if not same_bits(self.loss, other.loss):
            return "the loss"
        if not all(map(same_bits, self.gradients, other.gradients)):
            return "a gradient"
        if not all(map(same_bits, self.held, other.held)):
            return "a buffer"
        if not same_bits(self.state, other.state):
            return "the random generator"
        if len(self.records) != len(other.records) or not all(map(_same, self.records, other.records)):
            return "a logged value"
        return None


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN counts as every other value."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = _INTEGERS.get(a.dtype.itemsize, torch.uint8)
    a, b = (tensor.detach().contiguous().view(-1).view(kind) for tensor in (a, b))
    return torch.equal(a, b)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and same_bits(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a is b or bool(a == b)
