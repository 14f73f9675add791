# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedulers as they were, to which clients' visits put them back."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

Snapshot = list[dict[str, Any]]


class SchedulerStates:
    """Takes and puts back what schedulers know, those that they wrap included.

    Not through ``state_dict``: it holds wrapped schedulers by reference in many classes outside torch, and copies of
    them would go on with copies of the optimizer.
    """

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._parts: list[Any] = []
        for scheduler in schedulers:
            self._find(scheduler)

    def take(self) -> Snapshot:
        """Copies of all they know now."""
        return [{name: _copied(value) for name, value in vars(part).items()} for part in self._parts]

    def put(self, snapshot: Snapshot) -> None:
        """Brings them to where :meth:`take` was called."""
        for part, before in zip(self._parts, snapshot, strict=True):
            own = vars(part)
            for name in own.keys() - before.keys():
                del own[name]
            own.update({name: _copied(value) for name, value in before.items()})

    def _find(self, thing: Any) -> None:
        if any(thing is part for part in self._parts):
            return
        self._parts.append(thing)
        for name, value in vars(thing).items():
            for item in value if isinstance(value, (list, tuple)) else [value]:
                # Lambdas may be objects with a memory of their own; functions and classes have none.
                remembers = name == "lr_lambdas" and hasattr(item, "__dict__") and not hasattr(item, "__qualname__")
                if isinstance(item, LRScheduler) or remembers:
                    self._find(item)


def _copied(value: Any) -> Any:
    """A copy as deep as containers and tensors go; other objects stay the same."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple, deque):
        return type(value)(map(_copied, value))
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value
