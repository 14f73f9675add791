# SPDX-License-Identifier: Apache-2.0
"""What a report says first: what its methods come to, and who is worst off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from statistics import fmean

from fl_lightning.arguments import listed
from fl_lightning.metrics.functional import Mode
from fl_lightning.report.number_formats import STAGES, isolated, notation, number, plural, shortened, spread
from fl_lightning.report.repetitions import Estimate, mark
from fl_lightning.report.runs_of_a_method import PERSONAL, Method, Stage, goodness, label_of
from fl_lightning.report.tables import MethodSummary, Summary

LOCAL, POOLED = "local only", "pooled"
"""What the two bounds are called: each client alone, and one model on the data of all."""

_MARKS = {"+": "better", "-": "worse", "": "may be chance"}


def conclude(rows: Sequence[MethodSummary], metric: str, mode: Mode) -> list[str]:
    """What a table comes to, a paragraph each.

    The method that is best for whoever is worst stands against the bounds, and the best of the others against the first
    method. Rows without values do not count.
    """
    endless = [row.method for row in rows if row.not_finite]
    usable = [row for row in rows if row.numbers.get("worst") and row.numbers.get("mean") and not row.not_finite]
    methods = [row for row in usable if not row.bound]
    pairs = [(row, _best(methods, mode)) for row in usable if row.bound and methods]
    pairs += [(methods[0], _best(methods[1:], mode))] if methods[1:] else []
    found = [f"With {', '.join(endless)}, a run ends with clients whose {metric} is not finite."] * bool(endless)
    return found + [_contrast(base, other, metric, mode) for base, other in pairs]


def _best(methods: Sequence[MethodSummary], mode: Mode) -> MethodSummary:
    return max(methods, key=lambda row: goodness(fmean(row.numbers["worst"].values()), mode))


def _contrast(base: MethodSummary, other: MethodSummary, metric: str, mode: Mode) -> str:
    found = [Estimate.of(row.numbers[key].values()) for key in ("worst", "mean") for row in (base, other)]
    form = notation([one.mean for one in found])
    low, high, before, after = (spread(one, form) for one in found)
    worst, mean = (
        _MARKS[mark(other.numbers[key], base.numbers[key], larger_is_better=mode == "max")] for key in ("worst", "mean")
    )
    return (
        f"With {other.method} instead of {base.method}, whoever is worst goes from {metric} {low} to {high} ({worst}), "
        f"and the mean from {before} to {after} ({mean})."
    )


def lede(methods: Sequence[Method], stage: Stage, table: Summary | None) -> list[str]:
    """What a report says first, a paragraph each: what a comparison comes to, and who is worst off."""
    if table is None:
        return ["No evaluation has told the clients apart yet.", "So nobody can say who is worst off."]
    rows = [replace(row, method=_quoted(row.method)) for row in table.rows]
    found, first = conclude(rows, table.metric, table.mode), methods[0]
    if rows[0].not_finite:
        return [*found, "No number below counts that run, so they cannot say who is worst off."]
    metric = first.own(table.metric, stage)
    everyone = first.clients(metric, stage)
    points = [point for point in everyone if not isnan(point.value)]
    after = f"After {plural(len(first.first.rounds), 'round')} of {_quoted(first.label)}"
    if len(first.fits) > 1:
        after += f" ({plural(len(first.fits), 'seed')})"
    mean = sum(point.value for point in points) / len(points)
    worst, form = points[0], notation([points[0].value, mean])
    found.append(
        f"{after}, {_quoted(worst.label)} ({plural(worst.size, f'{STAGES[stage]} sample')}) is worst off: its {metric} "
        f"is {number(worst.value, form)}, and the mean of {plural(len(points), 'client')} is {number(mean, form)}."
    )
    without = [one.label for one in everyone if isnan(one.value)]
    found[-1] += f" There is no value for {_some(without)}." if without else ""
    for method in methods:
        found += _one_class(method, method.own(table.metric, stage), stage)
    return found


def _one_class(method: Method, metric: str, stage: Stage) -> list[str]:
    """A sentence about clients all of whose samples get one class."""
    own, clients = metric.startswith(PERSONAL), dict[str, None]()
    for record in method.records:
        values = record.last_values(stage)
        for name, some in values.one_class.items() if values is not None else ():
            clients |= {label_of(record, c): None for c in some if name.startswith(PERSONAL) == own}
    if not clients:
        return []
    words = "get one class, though they are of several: accuracy there is the share of that class."
    return [f"With {_quoted(method.label)}, all samples of {_some(list(clients))} {words}"]


def _some(labels: list[str]) -> str:
    more = [plural(len(labels) - 4, "client")] if len(labels) > 5 else list(map(_quoted, labels[4:]))
    return listed([*map(_quoted, labels[:4]), *more], "and")


def _quoted(label: str) -> str:
    return isolated(shortened(label, 60))
