# SPDX-License-Identifier: Apache-2.0
"""When a metric of a client is undefined: it is NaN, it raises, or torchmetrics warns that it has put a number there.

A hospital without a positive patient has no AUROC. torchmetrics returns 0.0 for it and warns. With ``thresholds=`` it
returns 0.0 and says nothing; then the counts in the metric's state tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, classification
from torchmetrics.utilities import prints

UNDEFINED = (
    r"No negative samples in targets, false positive value should be meaningless",
    r"No positive samples in targets, true positive value should be meaningless",
    r"No positive samples found in target, recall is undefined",
    r"Average precision score for one or more classes was `nan`",
    r"LogAUC score for one or more classes/labels was `nan`",
    r"At least two values on for the fpr and tpr are required to compute the log AUC",
    r"The variance of predictions or target is close to zero",
    r"Unable to compute .* using bias correction",
    r"More independent regressions than data points in adjusted r2 score",
    r"Division by zero in adjusted r2 score",
    r"\d+ NaN values found in confusion matrix have been replaced with zeros",
    r"Detected zero division in _safe_divide",
    r"SVD calculation in procrustes_disparity failed",
    r"Predictions and references are empty",
    r"The ``compute`` method of metric .* was called before the ``update`` method",
)
"""How warnings of torchmetrics 1.x begin after which the value says nothing about the data."""

_CURVES = (
    classification.BinaryPrecisionRecallCurve,
    classification.MulticlassPrecisionRecallCurve,
    classification.MultilabelPrecisionRecallCurve,
)
"""The base classes of all metrics that take ``thresholds=``."""

_OF_POSITIVES = frozenset(
    ("average_precision", "precision_recall_curve", "precision_fixed_recall", "recall_fixed_precision")
)
"""Modules of torchmetrics whose metrics need positive samples alone; the others need negative ones too."""

_ANY = re.compile("|".join(f"(?:{text})" for text in UNDEFINED))


class Noticed:
    """Hears what torchmetrics warns of while it is installed, also what Python would show only once."""

    def __init__(self) -> None:
        self.reasons: list[str] = []  # the first sentences of the listed warnings so far
        self._apart = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listens. Warnings go on as ever, but for the listed ones inside :meth:`apart`."""
        # Not warnings.catch_warnings: it makes Python show again, in every round, what it has shown once.
        module = vars(prints)
        outer = module["warnings"]
        module["warnings"] = SimpleNamespace(warn=partial(self._hear, outer.warn))
        try:
            yield
        finally:
            module["warnings"] = outer

    def _hear(self, warn: Callable[..., None], message: Any, *args: Any, **kwargs: Any) -> None:
        if _ANY.match(str(message)):
            self.reasons.append(str(message).split(". ")[0].rstrip("."))
            if self._apart:
                return
        warn(message, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 2})

    @contextmanager
    def apart(self) -> Iterator[list[str]]:
        """What the body alone is warned of; nobody else hears of the listed ones."""
        outer, self.reasons, was, self._apart = self.reasons, [], self._apart, True
        try:
            yield self.reasons
        finally:
            self.reasons, self._apart = outer, was

    def computed(self, metric: Metric, compute: Any = None) -> tuple[Any, str | None]:
        """A metric's value, all NaN where it is undefined, and why."""
        with self.apart() as reasons:
            metric._computed = None  # a cached value would not warn again
            reasons.extend(missing_classes(metric))
            try:
                value = (metric.compute if compute is None else compute)()
            except Exception as error:
                return torch.tensor(torch.nan), f"{type(error).__name__}: {error}"
        return (nan_like(value), reasons[0]) if reasons else (value, None)


def missing_classes(metric: Metric) -> list[str]:
    """Why a metric with ``thresholds=``, or one inside this metric, is undefined; torchmetrics does not warn of it."""
    found: list[str] = []
    for part in metric.modules():
        if not isinstance(part, _CURVES) or not hasattr(part, "confmat"):  # no thresholds: it keeps the samples
            continue
        negatives, positives = part.confmat[0].sum(-1).unbind(-1)  # every threshold has all samples
        if not bool(positives.all()):
            found.append("No positive samples in targets")
        elif not bool(negatives.all()) and _kind(part) not in _OF_POSITIVES:
            found.append("No negative samples in targets")
    return found


def _kind(metric: Metric) -> str:
    """The module of torchmetrics that the metric, or what it is derived from, comes from."""
    return next(c.__module__ for c in type(metric).__mro__ if c.__module__.startswith("torchmetrics.")).split(".")[-1]


def nan_like(value: Any) -> Any:
    """The same structure with NaN instead of numbers."""
    if isinstance(value, Tensor):
        return torch.full(value.shape, torch.nan, device=value.device)
    if isinstance(value, dict):
        return {key: nan_like(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(nan_like(item) for item in value)
    return torch.nan if isinstance(value, (int, float)) else value
