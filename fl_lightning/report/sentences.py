# SPDX-License-Identifier: Apache-2.0
"""What a report says first: what a comparison comes to, who is worst off, and whether the method changed it."""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.conclusion import conclude
from fl_lightning.report.number_formats import STAGES, isolated, notation, number, plural, shortened
from fl_lightning.report.record import FitRecord
from fl_lightning.report.runs_of_a_method import PERSONAL, Method, Stage, goodness, metrics_of, records_of
from fl_lightning.report.summary import summaries


def lede(methods: Sequence[Method], stage: Stage) -> list[str]:
    """What a report says first, a paragraph each: what a comparison comes to, and who is worst off."""
    metrics = metrics_of(records_of(methods), stage)
    if not metrics:
        return ["No evaluation has told the clients apart yet.", "So nobody can say who is worst off."]
    metric, mode = next(iter(metrics.items()))
    found, infinite = conclude(summaries(methods, metric, stage, mode), metric, mode, _called)
    first = methods[0]
    if first.label in infinite:
        return [*found, "No number below counts that client, so they cannot say who is worst off."]
    metric = first.own(metric, stage)
    points = first.points(metric, stage)
    if not points:
        return [*found, f"{first.label} has no value of {metric} for any client."]
    after = f"After {plural(len(first.first.rounds), 'round')} of {_called(first.label)}"
    if len(first.fits) > 1:
        after += f" ({plural(len(first.fits), 'seed')})"
    mean = sum(point.value for point in points) / len(points)
    worst, form = points[0], notation([points[0].value, mean])
    found.append(
        f"{after}, {_called(worst.label)} ({plural(worst.size, f'{STAGES[stage]} sample')}) is worst off: its {metric} "
        f"is {number(worst.value, form)}, and the mean of {plural(len(points), 'client')} is {number(mean, form)}."
    )
    if all(method.is_bound for method in methods[1:]):
        found.append(_since_the_beginning(first.first, metric, mode, stage))
    return found


def _called(label: str) -> str:
    return isolated(shortened(label, 60))


def _since_the_beginning(record: FitRecord, metric: str, mode: Mode, stage: Stage) -> str:
    """How the worst client and the gap to the mean have changed since the first validation."""
    metrics = metrics_of([record], "val")
    alike = (
        m for m, other in metrics.items() if (other, m.startswith(PERSONAL)) == (mode, metric.startswith(PERSONAL))
    )
    name = metric if metric in metrics else next(alike, None)
    begin = next((values for values in record.evaluations if values.stage == "val"), None)
    end = record.last_values("val")
    if name is None or begin is None or end is None or begin.round == end.round:
        return "There is no earlier evaluation to compare with, so whether the method changed that remains open."
    pairs = [[v for v in values.values.get(name, ()) if v is not None] for values in (begin, end)]
    if not all(pairs):
        return "The first evaluation has no values to compare with, so whether the method changed that remains open."
    worst = [min(values, key=lambda value: goodness(value, mode)) for values in pairs]
    means = [sum(values) / len(values) for values in pairs]
    gaps = [abs(mean - low) for mean, low in zip(means, worst, strict=True)]
    change = goodness(worst[1], mode) - goodness(worst[0], mode)
    better = "is better off" if change > 0 else "is worse off" if change < 0 else "is where it was"
    gap = "narrowed" if gaps[1] < gaps[0] else "widened" if gaps[1] > gaps[0] else "stayed the same"
    again = "" if name == metric else f" by {name}"
    form = notation([*worst, *gaps])
    ends, wide = ([number(value, form) for value in pair] for pair in (worst, gaps))
    return (
        f"Since the validation after {plural(begin.round, 'round')}, whoever is worst{again} {better} "
        f"(from {ends[0]} to {ends[1]}), and the gap to the mean has {gap} (from {wide[0]} to {wide[1]})."
    )
