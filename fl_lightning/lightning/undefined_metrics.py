# SPDX-License-Identifier: Apache-2.0
"""When a metric of a client is undefined: it is 0/0 or NaN, it raises, or torchmetrics warns while it computes.

A hospital without a positive patient has no AUROC and no recall. torchmetrics returns 0.0 for them. Of classification
the counts and samples in the metric's state tell, and else a warning: torchmetrics has none inside ``compute`` after
which the value is to be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import currentframe
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, prints

from fl_lightning.core.modules import shadowed, submodules
from fl_lightning.lightning.metric_state import in_forward
from fl_lightning.lightning.names import LightningModule


class MetricWarnings:
    """Hears what torchmetrics warns of while it is installed, also what Python would show only once."""

    def __init__(self) -> None:
        self.reasons: list[str] = []  # the first sentences of the warnings inside computations so far
        self._captures = self._computes = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listens. Warnings go on as ever, but for those of computations inside :meth:`captured`."""
        # Not warnings.catch_warnings: it makes Python show again, in every round, what it has shown once.
        module = vars(prints)
        outer = module["warnings"]
        module["warnings"] = SimpleNamespace(warn=partial(self._on_warning, outer.warn))
        try:
            yield
        finally:
            module["warnings"] = outer

    def _on_warning(self, warn: Callable[..., None], message: Any, *args: Any, **kwargs: Any) -> None:
        if self._computes or _is_computing():
            self.reasons.append(str(message).split(". ")[0].rstrip("."))
            if self._captures:
                return
        warn(message, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 2})

    @contextmanager
    def captured(self, computes: bool = False) -> Iterator[list[str]]:
        """What the body alone is warned of; nobody else hears of it. ``computes``: it does nothing but that."""
        before = self.reasons, self._captures, self._computes
        self.reasons, self._captures, self._computes = [], True, computes
        try:
            yield self.reasons
        finally:
            self.reasons, self._captures, self._computes = before

    def computed(self, metric: Metric, compute: Any = None, of_batch: bool = False) -> tuple[Any, str | None]:
        """A metric's value, NaN where it is undefined, and why; averages ``of_batch`` are torchmetrics' own."""
        with self.captured(computes=True) as reasons, self._inside(metric) as inside:
            metric._computed = None  # a cached value would not warn again
            try:
                value = (metric.compute if compute is None else compute)()
                found = undefined(metric)
                if found is not None:
                    return _judged(metric, value, found, of_batch)
            except Exception as error:
                return torch.tensor(torch.nan), f"{type(error).__name__}: {error}"
            finally:
                metric._computed = None
        if reasons:
            return nan_like(value), reasons[0]
        return value, next(iter(inside), None) if isinstance(value, Tensor) and bool(value.isnan().any()) else None

    @contextmanager
    def _inside(self, metric: Metric) -> Iterator[list[str]]:
        """Metrics in this one give NaN where they are undefined; and why that was."""
        found: list[str] = []

        def compute(part: Metric, own: Callable[[], Any]) -> Any:
            value, reason = self.computed(part, own)
            found.extend(() if reason is None else (reason,))
            return value

        with ExitStack() as stack:
            for _, part in submodules(metric)[1:]:
                if isinstance(part, Metric):
                    stack.enter_context(shadowed(part, compute=partial(compute, part, part.compute)))
            yield found


class LogNotes:
    """What a client's steps and hooks log: what is undefined, and from which metric object a value came."""

    def __init__(self, module: LightningModule) -> None:
        self._module, self.metric_warnings = module, MetricWarnings()
        self.metrics: Sequence[tuple[Metric, bool]] = ()  # of the module, and whether they are in other ones
        self.undefined: dict[str, str] = {}
        self.sources: dict[str, Metric] = {}
        self._computed: list[tuple[Any, Metric, str | None]] = []

    @contextmanager
    def listening(self, judges: bool, quietly: bool = True) -> Iterator[None]:
        """Around a client's batches, or its last hook; ``quietly``: nobody else hears of warnings.

        ``judges``: metrics give NaN where they are undefined, not the number of torchmetrics.
        """
        self.undefined, self.sources, self._computed = {}, {}, []
        with ExitStack() as stack:
            for metric, is_inside in self.metrics:
                compute = partial(self._compute, metric, metric.compute, is_inside, judges)
                stack.enter_context(shadowed(metric, compute=compute))
            stack.enter_context(shadowed(self._module, log=partial(self._log, self._module.log)))
            stack.enter_context(self.metric_warnings.captured() if quietly else ExitStack())
            yield

    def next_batch(self) -> None:
        """What functions have warned of, and what metrics have computed, concerns the batches before."""
        self.metric_warnings.reasons.clear()
        self._computed.clear()

    def computed(self, metric: Metric) -> tuple[Any, str | None]:
        """A metric's value, NaN where it is undefined, and why."""
        value, reason = self.metric_warnings.computed(metric)
        return value, reason or next((found[2] for found in self._computed if found[0] is value), None)

    def _compute(self, metric: Metric, compute: Callable[[], Any], is_inside: bool, judges: bool) -> Any:
        if judges:
            value, reason = self.metric_warnings.computed(metric, compute)
        else:
            of_batch, heard = in_forward(metric), len(self.metric_warnings.reasons)
            value = compute()
            reason = self.metric_warnings.computed(metric, lambda: value, of_batch)[1]
            reason = reason or next(iter(self.metric_warnings.reasons[heard:]), None)
            del self.metric_warnings.reasons[heard:]
            if reason is not None and is_inside and of_batch:  # the outer one makes another value of it
                self.metric_warnings.reasons.append(reason)
        self._computed += [(item, metric, reason) for item in (value.values() if isinstance(value, dict) else (value,))]
        return value

    def _log(self, log: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        source = next((found for found in self._computed if found[0] is value), None)
        if source is not None:
            self.sources[name] = source[1]
        # A function that has warned may have given this value or another one: none of them is to be trusted.
        reason = (source and source[2]) or next(iter(self.metric_warnings.reasons), None)
        if reason is not None and not isinstance(value, Metric):
            self.undefined[name] = reason
        log(name, value, *args, **kwargs)


class Undefined(NamedTuple):
    """What the state of a metric tells."""

    where: Tensor  # whether the value is 0/0, or that of each class ``[C]``
    reason: str
    support: Tensor | None = None  # samples of each class
    absent: Tensor | None = None  # classes that averages leave out: in neither labels nor predictions, or ignored
    needs_all: bool = False  # whether an average over the other classes is undefined with one of them


_RECALL = ("tp", "fn"), "No positive samples in targets"
_COUNTS: dict[str, tuple[tuple[str, ...], str]] = {
    "Precision": (("tp", "fp"), "No positive predictions"), "Recall": _RECALL,
    "Specificity": (("tn", "fp"), "No negative samples in targets"),
    "NegativePredictiveValue": (("tn", "fn"), "No negative predictions"),
    **dict.fromkeys(("FBetaScore", "JaccardIndex"), (("tp", "fp", "fn"), "No positive samples or predictions")),
    **dict.fromkeys(("Accuracy", "HammingDistance"), (("tp", "fp", "tn", "fn"), "No samples")),
}  # fmt: skip
"""The counts below the line, and why their sum is 0. Of several classes, the last two are those of recall."""

_OF_POSITIVES = ("AveragePrecision", "PrecisionRecallCurve", "PrecisionAtFixedRecall", "RecallAtFixedPrecision")
"""Curves that need positive samples alone; the others need negative ones too."""


def undefined(metric: Metric) -> Undefined | None:
    """Where its value is 0/0; ``None`` if its kind of state does not tell."""
    names = [c.__name__ for c in type(metric).__mro__ if c.__module__.startswith("torchmetrics.")]
    task = next((t for name in names for t in ("Binary", "Multiclass", "Multilabel") if name.startswith(t)), "")
    kinds = [name.removeprefix(task) for name in names]
    state: Any = metric
    if counted := next((kind for kind in kinds if kind in _COUNTS), None):
        return None if not task or isinstance(vars(metric).get("tp"), list) else _of_counts(state, counted, task)
    if "MatthewsCorrCoef" in kinds:
        table = state.confmat.sum(0) if state.confmat.dim() == 3 else state.confmat
        held = torch.stack([table.sum(-1), table.sum(-2)]) == table.sum()
        return Undefined(held.any(), "All targets or all predictions are of one class")
    if "PrecisionRecallCurve" in kinds and task:
        return _of_curve(state, kinds[0], task)
    return None


def _of_counts(state: Any, kind: str, task: str) -> Undefined:
    if hasattr(state, "confmat"):
        table, at = state.confmat, state.ignore_index
        if task == "Multiclass":
            tp = table.diag().clone()
            counts = {"tp": tp, "fp": table.sum(0) - tp, "fn": table.sum(1) - tp}
            for count in counts.values() if at is not None and 0 <= at < len(tp) else ():
                count[at] = 0  # torchmetrics leaves the class out of averages
        else:
            counts = {"fp": table[..., 0, 1], "fn": table[..., 1, 0], "tp": table[..., 1, 1]}
    else:
        counts = {name: getattr(state, name) for name in ("tp", "fp", "tn", "fn")}
    below, reason = _RECALL if task == "Multiclass" and kind in ("Accuracy", "HammingDistance") else _COUNTS[kind]
    if task == "Binary" or state.average == "micro":
        counts = {name: count.sum() for name, count in counts.items()}
    absent = counts["tp"] + counts["fp"] + counts["fn"] == 0 if task == "Multiclass" else None
    where = torch.as_tensor(sum(counts[name] for name in below) == 0)
    return Undefined(where, reason, counts["tp"] + counts["fn"], absent)


def _of_curve(state: Any, kind: str, task: str) -> Undefined | None:
    average = getattr(state, "average", None)
    if hasattr(state, "confmat"):  # with thresholds, every one of which has all samples
        negatives, positives = state.confmat[0].sum(-1).unbind(-1)
    elif not state.target:
        return None
    else:
        target = dim_zero_cat(state.target)
        if task == "Multiclass" and average != "micro":
            positives = torch.bincount(target, minlength=state.num_classes)
            negatives = target.numel() - positives
        else:
            positives, negatives = (target == 1).sum(0), (target == 0).sum(0)
    if average == "micro":
        positives, negatives = positives.sum(), negatives.sum()
    where, at, absent = positives == 0, state.ignore_index, torch.zeros_like(positives, dtype=torch.bool)
    if task == "Multiclass" and absent.dim() and at is not None and 0 <= at < len(absent):
        absent[at] = True
    some = "positive" if kind in _OF_POSITIVES or bool((where & ~absent).any()) else "negative"
    where = where if kind in _OF_POSITIVES else where | (negatives == 0)
    return Undefined(where, f"No {some} samples in targets", positives, absent, needs_all=True)


def _judged(metric: Metric, value: Any, found: Undefined, of_batch: bool) -> tuple[Any, str | None]:
    """The value, NaN for 0/0. Averages over classes are as in scikit-learn with ``zero_division=nan``."""
    where, average = found.where, getattr(metric, "average", None)
    if not bool(where.any()):
        return value, None
    if where.dim() and average in (None, "none"):
        return nan_like(value, where), found.reason
    absent = torch.zeros_like(where) if found.absent is None else found.absent
    if where.dim() and found.support is not None and not (found.needs_all and bool((where & ~absent).any())):
        taken = ~(where | absent)
        weights = found.support[taken] if average == "weighted" else torch.ones_like(found.support)[taken]
        if bool(taken.any()) and isinstance(value, Tensor):
            if of_batch:
                return value, None
            with shadowed(metric, average="none"):
                classes = type(metric).compute(metric)[taken]
            weights = weights if bool(weights.any()) else torch.ones_like(weights)
            return (classes * weights).sum() / weights.sum(), None
    return nan_like(value), found.reason


def _is_computing() -> bool:
    """Whether torchmetrics is in a function that computes values, and not in one that takes in samples."""
    frame = currentframe()
    while frame is not None:
        if frame.f_code.co_name.endswith("compute") and frame.f_globals["__name__"].startswith("torchmetrics."):
            return True
        frame = frame.f_back
    return False


def nan_like(value: Any, where: Tensor | None = None) -> Any:
    """The same structure with NaN instead of numbers, or of those of some classes."""
    if isinstance(value, Tensor):
        if where is None:
            return torch.full(value.shape, torch.nan, device=value.device)
        return value.masked_fill(where, torch.nan) if value.shape == where.shape else value
    if isinstance(value, dict):
        return {key: nan_like(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(nan_like(item, where) for item in value)
    return torch.nan if where is None and isinstance(value, (int, float)) else value
