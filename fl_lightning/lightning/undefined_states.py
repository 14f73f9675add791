# SPDX-License-Identifier: Apache-2.0
"""Where the value of a metric of torchmetrics is 0/0, as the counts and samples in its state tell.

torchmetrics puts a number there: the recall of a hospital without a positive patient is 0.0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class Undefined(NamedTuple):
    """What the state of a metric tells."""

    where: Tensor  # whether the value is 0/0, or that of each class ``[C]``
    reason: str
    support: Tensor | None = None  # samples of each class
    absent: Tensor | None = None  # classes that averages leave out: in neither labels nor predictions, or ignored
    needs_all: bool = False  # whether an average over the other classes is undefined with one of them
    complete: bool = True  # whether there is nothing else that makes a value up


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
    if kinds[0].startswith("Retrieval"):
        return _of_queries(state, kinds[0])
    where = _of_regression(state, kinds)
    return None if where is None else Undefined(where.any(), "It divides by a spread or a count of 0", complete=False)


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


def _of_queries(state: Any, kind: str) -> Undefined | None:
    """Undefined where no query has what the metric looks for; a single such query is what users have said."""
    if not state.target or (kind in ("RetrievalPrecision", "RetrievalHitRate") and state.empty_target_action == "neg"):
        return None
    _, query = torch.unique(dim_zero_cat(state.indexes), return_inverse=True)
    relevant = dim_zero_cat(state.target) > 0
    found = torch.zeros(2, int(query.max()) + 1, dtype=torch.int64, device=query.device)
    found.index_put_((relevant.long(), query), torch.ones_like(query), accumulate=True)
    negative, positive = found > 0
    if kind == "RetrievalFallOut":
        return Undefined(~negative.any(), "No query has a negative sample")
    complete = positive & negative if kind == "RetrievalAUROC" else positive
    return Undefined(~complete.any(), "No query has the samples that it needs")


def _of_regression(state: Any, kinds: list[str]) -> Tensor | None:
    if "PearsonCorrCoef" in kinds:
        x, y = (
            _is_constant(v / state.n_total, m) for v, m in ((state.var_x, state.mean_x), (state.var_y, state.mean_y))
        )
        return x & y if "ConcordanceCorrCoef" in kinds else x | y
    if "SpearmanCorrCoef" in kinds and state.preds:
        return torch.stack([(v == v[0]).all(0) for v in map(dim_zero_cat, (state.preds, state.target))])
    if "R2Score" in kinds and state.total > 1:  # else it raises
        # torchmetrics takes what is this near to zero for it, and gives 0 or 1.
        spread = state.sum_squared_error - state.sum_error**2 / state.total
        return _vanishes(spread, state.sum_squared_error) | torch.isclose(spread, torch.zeros_like(spread), atol=1e-4)
    if "RelativeSquaredError" in kinds:
        return _vanishes(state.sum_squared_error - state.sum_error**2 / state.total, state.sum_squared_error)
    if "ExplainedVariance" in kinds:
        spread = state.sum_squared_target - state.sum_target**2 / state.num_obs
        return _vanishes(spread, state.sum_squared_target)
    if "WeightedMeanAbsolutePercentageError" in kinds:
        return torch.as_tensor(state.sum_scale == 0)
    if "NormalizedRootMeanSquaredError" in kinds:
        if state.normalization == "std":
            return _is_constant(state.var_val / state.total, state.mean_val)
        of = {"mean": state.mean_val, "range": state.max_val - state.min_val, "l2": state.target_squared}
        return torch.as_tensor(of[state.normalization] == 0)
    if "CriticalSuccessIndex" in kinds and hasattr(state, "hits"):
        return torch.as_tensor(state.hits + state.misses + state.false_alarms == 0)
    return None


def _is_constant(variance: Tensor, mean: Tensor) -> Tensor:
    return variance <= (4 * torch.finfo(mean.dtype).eps * mean) ** 2


def _vanishes(difference: Tensor, of: Tensor) -> Tensor:
    """Whether a difference of sums is nothing but their rounding."""
    return difference <= 16 * torch.finfo(of.dtype).eps * of
