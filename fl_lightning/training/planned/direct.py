# SPDX-License-Identifier: Apache-2.0
"""A plan's program called with a batch, where it is known that the guards of the plan hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fl_lightning.training.planned.plan import Plan
from fl_lightning.training.planned.step_log import Record


@dataclass(frozen=True)
class DirectCall:
    """Repeats a call that went through guards, with the tensors of another batch.

    Attributes:
        plan: that ran in the call.
        program: the plan's, for the memory that parameters and buffers lie in.
        taken: which of the batch's tensors the program takes, in its order.
        loss: which of the tensors that it returns is the loss.
        logged: what the call logged, with places among the returned tensors where values were.
    """

    plan: Plan
    program: Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]
    taken: tuple[int, ...]
    loss: int
    logged: tuple[tuple[int | None, Record], ...]

    def __call__(self, tensors: Sequence[Tensor], records: list[Record]) -> tuple[Tensor, list[Tensor | None]]:
        """The loss and the gradients.

        Args:
            tensors: of the batch, as :func:`tensors_of` gives them.
            records: takes what is logged.
        """
        returned, found = self.program(*[tensors[place] for place in self.taken])
        for place, record in self.logged:
            records.append(record if place is None else (record[0], returned[place], record[2], record[3]))
        return returned[self.loss], [None if place is None else found[place] for place in self.plan.places]


def direct_call(plan: Plan, tensors: Sequence[Tensor], loss: Tensor, records: Sequence[Record]) -> DirectCall | None:
    """How to repeat the plan's last call; ``None`` if what went in or came out is not all of the batch or the program.

    Args:
        plan: has just run.
        tensors: of the batch.
        loss: what the call returned.
        records: what it logged.
    """
    returned = plan.returned
    taken = [_place(tensors, given) for given in plan.given]
    losses = _place(returned, loss)
    logged = []
    for record in records:
        place = _place(returned, record[1])
        if (place is None and isinstance(record[1], Tensor)) or any(map(_holds_tensors, record[2:])):
            return None
        logged.append((place, record))
    if losses is None or None in taken:
        return None
    places = tuple(place for place in taken if place is not None)
    return DirectCall(plan, plan.program, places, losses, tuple(logged))


def tensors_of(batch: Any) -> Sequence[Tensor] | None:
    """The tensors of a batch that holds nothing else; ``None`` for other batches."""
    if isinstance(batch, Tensor):
        return (batch,)
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(parts, (list, tuple)) and all(isinstance(part, Tensor) for part in parts):
        return parts
    return None


def _place(tensors: Sequence[Tensor], wanted: Any) -> int | None:
    return next((place for place, tensor in enumerate(tensors) if tensor is wanted), None)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_holds_tensors, value)))
