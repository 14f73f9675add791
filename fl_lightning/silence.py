# SPDX-License-Identifier: Apache-2.0
"""A module whose steps leave no trace in logs, metrics and attributes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchmetrics import Metric

from fl_lightning._lightning import LightningModule
from fl_lightning.attributes import OwnAttributes
from fl_lightning.results import MetricState
from fl_lightning.submodules import modes_kept, submodules


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
