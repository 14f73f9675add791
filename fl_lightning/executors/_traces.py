# SPDX-License-Identifier: Apache-2.0
"""Notices what training, hooks and callbacks change in Python objects, apart from parameters and buffers.

A process that trains clients has a copy of the module. What ``training_step`` writes into attributes there
(``self.losses.append(loss)``) is lost for everybody else, and what callbacks write into the original comes too late for
the copy. Both show in these marks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from fl_lightning._lightning import LightningModule, Trainer

Marks = dict[str, Any]

_PLAIN = (type(None), bool, int, str, bytes, complex, torch.dtype, torch.device)
_OPAQUE = (Trainer, LightningModule, Optimizer, ModuleType, FunctionType, BuiltinFunctionType, MethodType, type)
_LONG = 256  # items; of longer lists, the length and the ends count
_DEEP = 5
# What torch, Lightning and this package change in modules all the time; children are modules of their own.
_SKIPPED = {"_parameters", "_buffers", "_modules", "_trainer", "_fabric", "_current_fx_name", "_metric_attributes"}
_SKIPPED |= {"log", "log_dict", "federated_features"}
_EMPTY = {name: value for name, value in vars(nn.Module()).items() if name not in _SKIPPED}


def module_marks(module: nn.Module, metrics: bool = True) -> Marks:
    """Marks of all attributes of a module and its submodules, by name; of metrics, whether they were updated."""
    marks: Marks = {}
    for prefix, part in module.named_modules():
        if isinstance(part, Metric):
            if metrics:
                marks[prefix] = part._update_count
            continue
        for name, value in vars(part).items():
            # Most are the empty dicts for hooks that every module has.
            if name not in _SKIPPED and not (name in _EMPTY and name != "training" and not value):
                marks[f"{prefix}.{name}" if prefix else name] = mark(value)
    return marks


def is_metric(module: nn.Module, name: str) -> bool:
    """Whether a mark belongs to a metric."""
    return any(isinstance(part, Metric) for prefix, part in module.named_modules() if prefix == name)


def structure(module: nn.Module) -> Marks:
    """Marks of which submodules, buffers and frozen parameters there are."""
    marks: Marks = {}
    for prefix, part in module.named_modules():
        frozen = [(n, id(p), p._version) for n, p in part._parameters.items() if p is not None and not p.requires_grad]
        kept = [(n, id(b)) for n, b in part._buffers.items()]
        marks[prefix] = (id(part), tuple(part._modules), frozen, [] if isinstance(part, Metric) else kept)
    return marks


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names whose marks differ."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def mark(value: Any, depth: int = 0) -> Any:
    """Something that compares equal as long as the value stays as it is.

    Tensors and unknown objects count as changed when others take their place or torch counts a change in place.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, float):
        return repr(value)  # NaN must equal NaN
    if isinstance(value, Tensor):
        return value.data_ptr(), id(value), 0 if value.is_inference() else value._version
    if depth > _DEEP or isinstance(value, (*_OPAQUE, Metric)):
        return id(value)
    if isinstance(value, Mapping):
        return _items(value, value.items(), depth)
    if isinstance(value, (list, tuple, deque)):
        return _items(value, value, depth)
    if isinstance(value, (set, frozenset)):
        return _items(value, sorted(value, key=repr) if len(value) <= _LONG else (), depth)
    if isinstance(value, np.ndarray):
        return id(value), value.shape, value.tobytes() if value.nbytes <= 2**16 else None
    state = _generator_state(value)
    if state is not None:
        return state
    own = getattr(value, "__dict__", None)
    return id(value), _items(own, own.items(), depth) if isinstance(own, dict) else None


def _items(holder: Any, items: Iterable[Any], depth: int) -> Any:
    if len(holder) > _LONG:
        ends = [holder[0], holder[-1]] if isinstance(holder, (list, tuple, deque)) else []
        return id(holder), len(holder), tuple(mark(item, depth + 1) for item in ends)
    return type(holder), tuple(mark(item, depth + 1) for item in items)


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    return value.getstate() if isinstance(value, random.Random) else None
