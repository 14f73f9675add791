# SPDX-License-Identifier: Apache-2.0
"""What a module keeps beside parameters and buffers: plain attributes and the states of its metrics.

Lightning projects append to lists, count and cache in ``training_step``. Where a module runs once more than its author
expects, this puts back what it has left behind.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric

from fl_lightning.core.modules import submodules
from fl_lightning.lightning.metric_state import MetricState
from fl_lightning.lightning.names import LightningModule

_CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict)
_FRAMEWORK = frozenset(vars(nn.Module())) | frozenset(vars(LightningModule()))


class ModuleState:
    """Remembers the plain attributes and the metric states of a module and its submodules.

    Containers are remembered with all that they contain, and emptied or refilled in place, because others may hold
    them too. Other values are remembered as they are: an attribute that is bound anew comes back, an object that
    changes inside does not.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = [part for _, part in submodules(module)]
        self._metrics = [MetricState(part) for part in parts if isinstance(part, Metric)]
        self._owners = [
            (part, {name: value for name, value in vars(part).items() if name not in _FRAMEWORK})
            for part in parts
            if not isinstance(part, Metric)
        ]
        self._contents: dict[int, tuple[Any, Any]] = {}
        for _, own in self._owners:
            for value in own.values():
                self._remember(value)

    def _remember(self, value: Any) -> None:
        # Exact types: a subclass may be anything, for instance a hyperparameter dictionary that is also saved.
        if type(value) not in _CONTAINERS or id(value) in self._contents:
            return
        content = copy.copy(value)
        self._contents[id(value)] = (value, content)
        for item in content.values() if isinstance(content, dict) else content:
            self._remember(item)

    def reset_metrics(self) -> None:
        """Empties all metrics; their updates may be in place and must not reach the remembered tensors."""
        for state in self._metrics:
            state.reset()

    def restore(self) -> None:
        """Puts everything back, and removes attributes that are new."""
        for part, own in self._owners:
            current = vars(part)
            for name in [name for name in current if name not in own and name not in _FRAMEWORK]:
                del current[name]
            current.update(own)
        for value, content in self._contents.values():
            value.clear()
            value.update(content) if isinstance(value, (dict, set)) else value.extend(content)
        for state in self._metrics:
            state.put_back()


@contextmanager
def shadowed(owner: object, **values: Any) -> Iterator[None]:
    """Puts other values in front of attributes and methods of an object, and takes them away in the end."""
    attributes = vars(owner)  # nn.Module's own way of setting one would register submodules and tensors
    hidden = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(hidden)
