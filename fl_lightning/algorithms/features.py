# SPDX-License-Identifier: Apache-2.0
"""The features that a module computes before its last layer, for methods that compare representations.

For such methods the module defines ``federated_features(batch)``. It returns the features ``[B, d]`` of the
batch, or a pair of them and the samples' class indices ``[B]``, which methods with class prototypes need:

    def federated_features(self, batch):
        images, labels = batch
        return self.encoder(images), labels

It is a pass of its own, after that of ``training_step``, in which BatchNorm counts nothing and dropout draws anew. A
``training_step`` that calls ``self.federated_features(batch)`` itself saves that pass: the features are then those that
its loss was computed from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.records import LocalWork
from fl_lightning.core.errors import ModuleError
from fl_lightning.core.model_snapshot import Snapshot, standing_in

METHOD = "federated_features"


class Features(NamedTuple):
    """Features ``[B, d]`` in single precision or better, and class indices ``[B]`` if the module gives them."""

    values: Tensor
    labels: Tensor | None


class FeatureRecorder:
    """Replaces a module's ``federated_features`` on the object and keeps what the last call returned."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._method = getattr(module, METHOD)
        self._batch: Any = None
        self._output: Any = None

    def install(self) -> None:
        """Takes the method's place on this object."""
        self._module.__dict__[METHOD] = self

    def remove(self) -> None:
        """Gives the module its own method back."""
        self._module.__dict__.pop(METHOD, None)
        self.forget()

    def forget(self) -> None:
        """A new batch begins."""
        self._batch = self._output = None

    def __call__(self, batch: Any) -> Any:
        """What the module's own method returns."""
        output = self._method(batch)
        if torch.is_grad_enabled():
            self._batch, self._output = batch, output
        return output

    def output(self, batch: Any) -> Any:
        """What was returned for this very batch, or ``None``."""
        return self._output if batch is self._batch else None


def own_features(work: LocalWork, batch: Any) -> Features:
    """The client's features of a batch, differentiable in its parameters."""
    recorder = vars(work.module).get(METHOD)
    output = recorder.output(batch) if isinstance(recorder, FeatureRecorder) else None
    if output is None:
        with standing_in(work.module, work.parameters, work.layout), work.forward_context():
            output = getattr(work.module, METHOD)(batch)
    return _checked(output, work.module)


@torch.no_grad()
def features_of(model: Snapshot, work: LocalWork, batch: Any) -> Tensor:
    """``[B, d]`` what another model makes of the batch, in evaluation mode."""
    with standing_in(work.module, work.parameters, work.layout, model, evaluate=True), work.forward_context():
        output = getattr(work.module, METHOD)(batch)
    return _checked(output, work.module).values


def class_labels(features: Features, module: nn.Module) -> Tensor:
    """``[B]`` int64 class indices."""
    if features.labels is None:
        raise ModuleError(
            f"{type(module).__name__}.{METHOD} must return a pair (features [B, d], class indices [B]) for methods "
            "with class prototypes, found features alone"
        )
    return features.labels


def _checked(output: Any, module: nn.Module) -> Features:
    values, labels = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
    name = f"{type(module).__name__}.{METHOD}"
    if not isinstance(values, Tensor) or values.dim() != 2 or not values.is_floating_point():
        found = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ModuleError(f"{name} must return features [B, d], or a pair of them and class indices [B], found {found}")
    if labels is not None:
        fits = isinstance(labels, Tensor) and labels.shape == values.shape[:1]
        if not fits or labels.is_floating_point() or labels.is_complex():
            found = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
            raise ModuleError(f"{name} must return class indices [{len(values)}] beside the features, found {found}")
        labels = labels.to(values.device, torch.int64)
    return Features(values.float() if values.dtype.itemsize < 4 else values, labels)
