# SPDX-License-Identifier: Apache-2.0
"""What a module keeps in plain attributes: lists that its steps append to, counters, caches.

Since epoch-end hooks no longer receive what steps return, Lightning projects collect it in lists of their own.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric

from fl_lightning.core.lightning.metric_state import MetricState
from fl_lightning.core.lightning.names import LightningModule
from fl_lightning.core.modules import modes_kept, submodules

_CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict)
_INTERNAL = frozenset(vars(nn.Module())) | frozenset(vars(LightningModule()))
"""Parameters, buffers, submodules and hooks of torch, and what Lightning itself keeps in a module."""


class OwnAttributes:
    """Remembers the plain attributes of a module and its submodules.

    Containers are remembered with all that they contain, and emptied or refilled in place, because others may hold
    them too. Other values are remembered as they are: an attribute that is bound anew comes back, an object that
    changes inside does not. Metrics keep their states themselves and are left out.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        for _, owner in submodules(module):
            if isinstance(owner, Metric):
                continue
            own = {name: value for name, value in vars(owner).items() if name not in _INTERNAL}
            self._owners.append((vars(owner), own))
            for value in own.values():
                self._remember(value)

    def _remember(self, value: Any) -> None:
        # Exact types: a subclass may be anything, for instance a hyperparameter dictionary that is also saved.
        if type(value) not in _CONTAINERS or id(value) in self._contents:
            return
        self._contents[id(value)] = (value, copy.copy(value))
        for item in value.values() if isinstance(value, dict) else value:
            self._remember(item)

    def sequences(self) -> list[Any]:
        """The lists and deques among what is remembered: the objects themselves."""
        return [container for container, _ in self._contents.values() if isinstance(container, (list, deque))]

    def restore(self) -> None:
        """Puts all attributes back, and removes those that are new."""
        for current, own in self._owners:
            for name in [name for name in current if name not in _INTERNAL and name not in own]:
                del current[name]
            current.update(own)
        for value, content in self._contents.values():
            refill(value, content)


def refill(container: Any, content: Any) -> None:
    """Gives a list, dictionary, set or deque the items of another one, in place."""
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)


@contextmanager
def silenced(module: LightningModule, evaluate: bool = True) -> Iterator[None]:
    """Eval mode without side effects: ``self.log`` does nothing, metric states and plain attributes come back.

    Args:
        module: the module.
        evaluate: False leaves the training modes alone.
    """
    parts, attributes = submodules(module), OwnAttributes(module)
    states = [MetricState(part) for _, part in parts if isinstance(part, Metric)]
    for state in states:
        state.reset()  # updates may be in place: they must not reach the saved tensors
    shadows = {name: module.__dict__.get(name) for name in ("log", "log_dict")}
    for name in shadows:
        module.__dict__[name] = _ignore
    try:
        with modes_kept(parts):
            if evaluate:
                module.eval()
            yield
    finally:
        for name, shadow in shadows.items():
            del module.__dict__[name]
            if shadow is not None:
                module.__dict__[name] = shadow
        attributes.restore()
        for state in states:
            state.put_back()


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None
