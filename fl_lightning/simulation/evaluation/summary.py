# SPDX-License-Identifier: Apache-2.0
"""Turns per-client values into the metrics that are logged: mean, spread, worst and best clients, fairness angle."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan, nan

from torch import Tensor

from fl_lightning.core.records import EvaluationRecord
from fl_lightning.metrics.functional import fairness_summary, is_larger_better


def evaluation_metrics(
    record: EvaluationRecord, fairness_metric: str | None, larger_is_better: bool
) -> dict[str, float]:
    """Summary numbers of an evaluation under the names of docs/logged.md.

    Args:
        record: the per-client values.
        fairness_metric: metric whose direction is ``larger_is_better``; the others' direction follows from their names.
        larger_is_better: direction of ``fairness_metric``.
    """
    metrics: dict[str, float] = {}
    for name, values in record.values.items():
        larger = larger_is_better if name == fairness_metric else is_larger_better(name)
        metrics |= {f"fed/{name}/{key}": float(v) for key, v in _summary(values, record.sizes, larger).items()}
    return metrics


def _summary(values: Tensor, sizes: Tensor, larger: bool) -> Mapping[str, Tensor]:
    return fairness_summary(values, sizes, larger_is_better=larger)


def shown_angle(record: EvaluationRecord, metrics: Mapping[str, float], fairness_metric: str | None) -> float | None:
    """The fairness angle for the progress bar: that of ``fairness_metric``, else of the first metric that has one."""
    names = [fairness_metric] if fairness_metric is not None else list(record.values)
    angles = (metrics.get(f"fed/{name}/angle", nan) for name in names)
    return next((angle for angle in angles if not isnan(angle)), None)


def client_metrics(record: EvaluationRecord) -> dict[str, float]:
    """Every client's values under ``fed/<metric>/client/<id>``."""
    return {
        f"fed/{name}/client/{client}": float(value)
        for name, values in record.values.items()
        for client, value in zip(record.client_ids, values, strict=True)
    }
