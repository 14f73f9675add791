# SPDX-License-Identifier: Apache-2.0
"""What a module keeps beside parameters and buffers: plain attributes and the states of its metrics.

Lightning projects append to lists, count and cache in ``training_step`` and ``validation_step``. Where a module runs
once more than its author expects, this puts back what it has left behind.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.core.modules import modes_kept, submodules
from fl_lightning.lightning.metric_state import MetricState
from fl_lightning.lightning.names import LightningModule

_CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict)
_FRAMEWORK = frozenset(vars(nn.Module())) | frozenset(vars(LightningModule()))
_EMPTY = frozenset(name for name, value in vars(nn.Module()).items() if not value)
_TRANSIENT = frozenset(
    {"_parameters", "_buffers", "_modules", "_trainer", "_fabric", "_current_fx_name", "_metric_attributes"}
    | {"log", "log_dict", "federated_features"}
    | {"_enable_compute_groups", "_groups", "_groups_checked", "_state_is_copy"}
)
"""What no comparison looks at: compared elsewhere, or changed all the time by torch, Lightning, torchmetrics and us."""


def plain_attributes(part: nn.Module, framework: bool = False) -> dict[str, Any]:
    """The attributes of one module by name, without those of its submodules.

    Args:
        part: the module.
        framework: also what torch and Lightning keep in it: its mode, flags, hooks if it has any. These are compared,
            and never put back.
    """
    if not framework:
        return {n: v for n, v in vars(part).items() if n not in _FRAMEWORK}
    # Of an attribute that is empty in a new module, the truth may be asked for; of others it may not exist.
    return {n: v for n, v in vars(part).items() if n not in _TRANSIENT and (n not in _EMPTY or v)}


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
        self._owners = [(part, plain_attributes(part)) for part in parts if not isinstance(part, Metric)]
        self._contents: dict[int, tuple[Any, Any]] = {}
        # What torchmetrics keeps in a collection comes last: it is no collection of outputs.
        for collections in (False, True):
            self._outside = len(self._contents)
            for part, own in self._owners:
                if isinstance(part, MetricCollection) is collections:
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

    def sequences(self) -> list[Any]:
        """The lists and deques among what is remembered, torchmetrics' own apart: the objects themselves."""
        containers = [container for container, _ in islice(self._contents.values(), self._outside)]
        return [container for container in containers if isinstance(container, (list, deque))]

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
            refill(value, content)
        for state in self._metrics:
            state.put_back()


def refill(container: Any, content: Any) -> None:
    """Gives a list, dictionary, set or deque the items of another one, in place."""
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)


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


@contextmanager
def state_kept(module: nn.Module) -> Iterator[ModuleState]:
    """Metric states and plain attributes come back in the end."""
    state = ModuleState(module)
    try:
        yield state
    finally:
        state.restore()


@contextmanager
def silenced(module: LightningModule, evaluate: bool = True) -> Iterator[None]:
    """Eval mode without side effects: ``self.log`` does nothing, metric states and plain attributes come back.

    Args:
        module: the module.
        evaluate: False leaves the training modes alone.
    """
    with state_kept(module) as state:
        state.reset_metrics()
        with shadowed(module, log=_ignore, log_dict=_ignore), modes_kept(submodules(module)):
            if evaluate:
                module.eval()
            yield


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None
