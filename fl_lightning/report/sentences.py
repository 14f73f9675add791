# SPDX-License-Identifier: Apache-2.0
"""What a report says in words: who is worst off, and whether the method changed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.methods import Method, Stage, count_infinite, first_values, goodness, mark, metrics_of
from fl_lightning.report.record import FitRecord
from fl_lightning.report.words import STAGES, Spread, isolated, number, plural, shortened, spread


def two_sentences(methods: Sequence[Method], stage: Stage) -> tuple[str, str]:
    """Who is worst off, and whether the method changed it.

    Args:
        methods: the first of them is what others are compared with.
        stage: whose last values count.
    """
    records = [record for method in methods for record in method.records]
    metrics = metrics_of(records, stage)
    if not metrics:
        return "No evaluation has told the clients apart yet.", "So nobody can say who is worst off."
    metric, mode = next(iter(metrics.items()))
    first = methods[0]
    endless = [method.label for method in methods if _ends_infinite(method, metric, stage)]
    if endless:
        names = ", ".join(isolated(shortened(label, 60)) for label in endless)
        return (
            f"With {names}, the {metric} of a client is infinite at the end.",
            "No number below counts that client, so they cannot say who is worst off.",
        )
    points = first.points(metric, stage)
    if not points:
        return f"{first.label} has no value of {metric} for any client.", "So nobody can say who is worst off."
    after = f"after {plural(len(first.records[0].rounds), 'round')} of {isolated(shortened(first.label, 60))}"
    if len(first.records) > 1:
        after += f" ({plural(len(first.records), 'seed')})"
    mean = sum(point.value for point in points) / len(points)
    worst = points[0]
    who = f"{isolated(shortened(worst.label, 60))} ({plural(worst.size, f'{STAGES[stage]} sample')})"
    opening = (
        f"{after[0].upper()}{after[1:]}, {who} is worst off: its {metric} is {number(worst.value)}, and the "
        f"mean of {plural(len(points), 'client')} is {number(mean)}."
    )
    others = [method for method in methods[1:] if not method.is_bound]
    if not others:
        return opening, _since_the_beginning(first.records[0], metric, mode, stage)
    return opening, _others([first, *others], metric, mode, stage)


def _ends_infinite(method: Method, metric: str, stage: Stage) -> bool:
    pairs = ((record, record.last_values(stage)) for record in method.records)
    return any(count_infinite(r, v, metric) > 0 for r, v in pairs if v is not None and metric in v.values)


def _since_the_beginning(record: FitRecord, metric: str, mode: Mode, stage: Stage) -> str:
    """How the worst client and the gap to the mean have changed since the first validation."""
    metrics = metrics_of([record], "val")
    name = metric if metric in metrics else next((m for m, other in metrics.items() if other == mode), None)
    begin, end = first_values(record, "val"), record.last_values("val")
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
    return (
        f"Since the validation after {plural(begin.round, 'round')}, whoever is worst{again} {better} "
        f"(from {number(worst[0])} to {number(worst[1])}), and the gap to the mean has {gap} (from {number(gaps[0])} "
        f"to {number(gaps[1])})."
    )


def _others(methods: Sequence[Method], metric: str, mode: Mode, stage: Stage) -> str:
    """Which other method does most for the worst client, and at what cost of the mean."""
    by_seed = [_good(method.worst(metric, stage), mode) for method in methods]
    others = [(method, worst) for method, worst in zip(methods, by_seed, strict=True) if worst][1:]
    if not by_seed[0] or not others:
        return f"No other method has values of {metric} to compare with."
    best, worst = max(others, key=lambda pair: fmean(pair[1].values()))
    gain = fmean(worst.values()) - fmean(by_seed[0].values())
    seeds = min(len(best.records), len(methods[0].records))
    name = isolated(shortened(best.label, 60))
    ends = [Spread.of(list(method.worst(metric, stage).values())) for method in (methods[0], best)]
    means = [Spread.of(list(method.summary(metric, stage, "mean").values())) for method in (methods[0], best)]
    numbers = f"whoever is worst goes from {spread(ends[0])} to {spread(ends[1])}"
    if None not in means:
        numbers += f", and the mean from {spread(means[0])} to {spread(means[1])}"
    if gain <= 0 and len(others) == 1:
        return f"{name} does not change that for the better: {numbers}."
    if gain <= 0:
        none = f"None of {plural(len(others), 'other method')} changes that for the better"
        return f"{none}, and {name} comes closest: {numbers}."
    names = f"Of {plural(len(others), 'other method')}, {name} helps most" if len(others) > 1 else f"{name} helps"
    if seeds > 1 and mark(worst, by_seed[0], larger_is_better=True) != "+":
        return f"{names}, but by less than seeds differ, which may be chance: {numbers}."
    return f"{names}: {numbers}{'' if seeds > 1 else '; with one seed, this may be chance'}."


def _good(numbers: Mapping[int | None, float], mode: Mode) -> dict[int | None, float]:
    return {seed: goodness(value, mode) for seed, value in numbers.items()}
