# SPDX-License-Identifier: Apache-2.0
"""The tables of a comparison as CSV: a row per run, and a row per run and client."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isnan
from typing import Any

from fl_lightning.comparison.fitted import Fitted
from fl_lightning.comparison.plan import Plan, Run
from fl_lightning.comparison.selection import STAGES, Measure, summary_of
from fl_lightning.comparison.summary import client_values, worst_client
from fl_lightning.report.conclusion import LOCAL, POOLED

RUN_COLUMNS = (
    "method", "learning_rate", "division", "seed", "picked", "status", "val_mean", "val_worst_10", "mean", "worst_10",
    "worst_client", "worst", "angle", "conflicts", "seconds", "error",
)  # fmt: skip
CLIENT_COLUMNS = (
    "method", "learning_rate", "division", "seed", "picked", "stage", "client", "name", "samples", "metric", "value",
)  # fmt: skip


def runs_csv(
    plan: Plan,
    results: Mapping[Run, Fitted],
    chosen: Mapping[str, float | None],
    measure: Measure,
    failures: Mapping[Run, str],
) -> str:
    """A row per run, those that failed as well."""
    rows = []
    for run in plan.runs(chosen):
        row: dict[str, Any] = {"picked": _picked(run, chosen), "status": "failed", "error": failures.get(run, "")}
        fitted = results.get(run)
        if fitted is not None:
            row |= {"status": "finished", "seconds": fitted.seconds, **_figures(run, fitted, measure)}
        rows.append({**_named(run), **row})
    return _text(RUN_COLUMNS, rows)


def clients_csv(plan: Plan, results: Mapping[Run, Fitted], chosen: Mapping[str, float | None]) -> str:
    """A row per finished run, stage, client and metric, at the end of the fit."""
    runs = [(run, results[run]) for run in plan.runs(chosen) if run in results]
    return _text(
        CLIENT_COLUMNS,
        ({**_named(run), "picked": _picked(run, chosen), **row} for run, fitted in runs for row in _clients(fitted)),
    )


def _figures(run: Run, fitted: Fitted, measure: Measure) -> dict[str, Any]:
    record = fitted.record
    found = summary_of(record, measure.reported_on, measure.metric, measure.mode)
    picked = summary_of(record, "val", measure.picked_by, measure.picked_mode or measure.mode)
    name = worst_client([fitted], measure)
    conflicts = () if run.method in (LOCAL, POOLED) else record.rounds.conflicts
    return {
        **{key: found.get(key) for key in ("mean", "worst_10", "angle")},
        "val_mean": picked.get("mean"),
        "val_worst_10": picked.get("worst_10"),
        "worst_client": name,
        "worst": client_values(fitted, measure).get(name),
        "conflicts": sum(conflicts) / len(conflicts) if conflicts else None,
    }


def _clients(fitted: Fitted) -> Iterator[dict[str, Any]]:
    names = fitted.record.client_names
    for stage in STAGES:
        found = fitted.record.last_values(stage)
        for metric, values in () if found is None else found.values.items():
            assert found is not None
            for client, samples, value in zip(found.client_ids, found.sizes, values, strict=True):
                yield {
                    "stage": stage, "client": client, "name": names[client], "samples": samples, "metric": metric,
                    "value": value,
                }  # fmt: skip


def _named(run: Run) -> dict[str, Any]:
    return {"method": run.method, "learning_rate": run.learning_rate, "division": run.division, "seed": run.seed}


def _picked(run: Run, chosen: Mapping[str, float | None]) -> int:
    return int(run.method in chosen and chosen[run.method] == run.learning_rate)


def _text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if _missing(value) else value for name, value in row.items()})
    return file.getvalue()


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and isnan(value))
