# SPDX-License-Identifier: Apache-2.0
"""What a comparison says of each method: means and deviations over repetitions, and differences to the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean

from fl_lightning.comparison.fitted import Fitted
from fl_lightning.comparison.plan import Plan, Run
from fl_lightning.comparison.selection import Measure, summary_of, values_of
from fl_lightning.report.conclusion import LOCAL, POOLED, Standing
from fl_lightning.report.repetitions import Repetition, mark, variation
from fl_lightning.report.runs_of_a_method import Method, goodness

NAN = float("nan")


@dataclass(frozen=True)
class Figure:
    """A number over repetitions.

    Attributes:
        mean: over the repetitions.
        deviation: standard deviation of a single fit's number; NaN with one repetition.
        mark: ``"+"`` if it is better than that of the reference, ``"-"`` if it is worse, empty where repetitions cannot
            tell: :func:`fl_lightning.report.repetitions.mark`.
        by_division: share of the variance that is the division's; NaN where repetitions cannot tell.
    """

    mean: float
    deviation: float
    mark: str = ""
    by_division: float = NAN


@dataclass(frozen=True)
class MethodSummary:
    """A row of the table.

    Attributes:
        method: its name.
        learning_rate: the one that was picked.
        repetitions: how many of them ran to their end.
        mean: mean over the clients.
        worst_10: mean over the worst tenth of the clients.
        worst_client: name of the client whose mean over the seeds is the worst; empty where several divisions make
            clients anew.
        worst: this client's value; with several divisions, that of the worst client of each.
        angle: fairness angle in radians; NaN for metrics where small values are good.
        conflicts: clients in conflict with the step, per round; NaN for bounds.
        cohort: clients in a round, on average.
        seconds: wall-clock seconds of a run.
        not_finite: of how many repetitions the numbers are not finite, and left out.
        without_value: how many clients that other rows count have no value in one repetition at least.
    """

    method: str
    learning_rate: float | None
    repetitions: int
    mean: Figure
    worst_10: Figure
    worst_client: str
    worst: Figure
    angle: Figure
    conflicts: float
    cohort: float
    seconds: float
    not_finite: int = 0
    without_value: int = 0


def summaries(
    plan: Plan, results: Mapping[Run, Fitted], chosen: Mapping[str, float | None], measure: Measure
) -> list[MethodSummary]:
    """One row per method that has runs, in the order of the plan."""
    rows, reference = list[MethodSummary](), dict[str, dict[Repetition, float]]()
    counted = dict[str, list[set[str]]]()
    for method in plan.methods:
        if method not in chosen:
            continue
        fits = _fits(plan, results, method, chosen[method])
        numbers, name = repeated_numbers(fits, measure)
        having = [_with_value(fitted, measure) for fitted in fits.values()]
        counted[method] = [names for names in having if names]
        if method == plan.reference:
            reference = numbers
        larger = measure.mode == "max"
        figures = {
            key: _figure(found, reference.get(key, {}), larger and key != "angle") for key, found in numbers.items()
        }
        bound = method in (LOCAL, POOLED)
        series = [] if bound else [fitted.record.rounds for fitted in fits.values()]
        conflicts = [count for rounds in series for count in rounds.conflicts]
        clients = [count for rounds in series for count in rounds.clients]
        rows.append(
            MethodSummary(
                method=method,
                learning_rate=chosen[method],
                repetitions=len(fits),
                mean=figures["mean"],
                worst_10=figures["worst_10"],
                worst_client=name,
                worst=figures["worst"],
                angle=figures["angle"],
                conflicts=fmean(conflicts) if conflicts else NAN,
                cohort=fmean(clients) if clients else NAN,
                seconds=fmean(fitted.seconds for fitted in fits.values()),
                not_finite=len(fits) - len(numbers["mean"]),
            )
        )
    everyone = set[str]().union(*(names for several in counted.values() for names in several))
    missing = {name: everyone - several[0].intersection(*several) for name, several in counted.items() if several}
    return [replace(row, without_value=len(missing.get(row.method, ()))) for row in rows]


def standings(
    plan: Plan, results: Mapping[Run, Fitted], chosen: Mapping[str, float | None], measure: Measure
) -> list[Standing]:
    """What :func:`~fl_lightning.report.conclusion.conclude` needs of each row."""
    found = []
    for method in chosen:
        fits = _fits(plan, results, method, chosen[method])
        numbers, _ = repeated_numbers(fits, measure)
        row = Method(method, tuple(fitted.record for fitted in fits.values()))
        infinite = row.ends_infinite(row.own(measure.metric, measure.reported_on), measure.reported_on)
        bound = method if method in (LOCAL, POOLED) else ""
        found.append(Standing(method, numbers["worst"], numbers["mean"], bound, infinite))
    return found


def _with_value(fitted: Fitted, measure: Measure) -> set[str]:
    return {name for name, value in client_values(fitted, measure).items() if isfinite(value)}


def _fits(plan: Plan, results: Mapping[Run, Fitted], method: str, rate: float | None) -> dict[Repetition, Fitted]:
    return {one: results[run] for one, run in plan.of_method(method, rate).items() if run in results}


def repeated_numbers(
    fits: Mapping[Repetition, Fitted], measure: Measure
) -> tuple[dict[str, dict[Repetition, float]], str]:
    """The numbers of the table, those that are not finite left out, and the name of the worst client.

    Where divisions make clients anew, each repetition has a worst client of its own, and none is named.
    """
    several = len({one.division for one in fits}) > 1
    name = "" if several else worst_client(list(fits.values()), measure)
    found: dict[str, dict[Repetition, float]] = {key: {} for key in ("mean", "worst_10", "worst", "angle")}
    for repetition, fitted in fits.items():
        summary = summary_of(fitted.record, measure.reported_on, measure.metric, measure.mode)
        value = client_values(fitted, measure).get(worst_client([fitted], measure) if several else name, NAN)
        value = abs(value) if measure.mode == "abs" else value
        for key, number in {**summary, "worst": value}.items():
            if key in found and isfinite(number):
                found[key][repetition] = number
    return found, name


def client_values(fitted: Fitted, measure: Measure) -> dict[str, float]:
    """Each client's value in the table's metric, by its name."""
    found = values_of(fitted.record, measure.reported_on, measure.metric)
    if found is None:
        return {}
    names = fitted.record.client_names
    return {names[client]: value for client, value in zip(found[0].client_ids, found[1], strict=True)}


def worst_client(fits: Sequence[Fitted], measure: Measure) -> str:
    """The client whose mean over the fits is the worst; empty if no client has a value."""
    values: dict[str, list[float]] = {}
    for fitted in fits:
        for name, value in client_values(fitted, measure).items():
            if isfinite(value):
                values.setdefault(name, []).append(goodness(value, measure.mode))
    return min(values, key=lambda name: fmean(values[name]), default="")


def _figure(
    numbers: Mapping[Repetition, float], reference: Mapping[Repetition, float], larger_is_better: bool
) -> Figure:
    if not numbers:
        return Figure(NAN, NAN)
    mean, varies = fmean(numbers.values()), variation(numbers)
    if varies is None:
        return Figure(mean, NAN)
    share = NAN if varies.by_division is None else varies.by_division
    return Figure(mean, varies.deviation, mark(numbers, reference, larger_is_better), share)
