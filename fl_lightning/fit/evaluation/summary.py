# SPDX-License-Identifier: Apache-2.0
"""Turns per-client values into the metrics that are logged: mean, spread, worst and best clients, fairness angle."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan, nan

from fl_lightning.core.records import EvaluationRecord


def evaluation_metrics(record: EvaluationRecord) -> dict[str, float]:
    """Summary numbers of an evaluation under the names of docs/logged.md."""
    metrics: dict[str, float] = {}
    for name in record.values:
        metrics |= {f"fed/{name}/{key}": float(value) for key, value in record.summary(name).items()}
        metrics[f"fed/{name}/undefined"] = float(len(record.undefined.get(name, ())))
    return metrics


def shown_angle(record: EvaluationRecord, metrics: Mapping[str, float], fairness_metric: str | None) -> float | None:
    """The fairness angle for the progress bar: that of ``fairness_metric``, else of the first metric that has one."""
    names = [fairness_metric] if fairness_metric is not None else list(record.values)
    angles = (metrics.get(f"fed/{name}/angle", nan) for name in names)
    return next((angle for angle in angles if not isnan(angle)), None)


def client_metrics(record: EvaluationRecord, by_name: bool = False) -> dict[str, float]:
    """Every client's values under ``fed/<metric>/client/<id>``, or under its name."""
    labels = record.client_names if by_name else record.client_ids
    return {
        f"fed/{name}/client/{label}": float(value)
        for name, values in record.values.items()
        for label, value in zip(labels, values, strict=True)
    }
