# SPDX-License-Identifier: Apache-2.0
"""What a comparison says of each method: means and deviations over seeds, and differences to the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean, stdev

from fl_lightning.comparison.fitted import Fitted
from fl_lightning.comparison.plan import Plan, Run
from fl_lightning.comparison.selection import Measure, summary_of, values_of
from fl_lightning.report.conclusion import LOCAL, POOLED, Standing
from fl_lightning.report.runs_of_a_method import Method, goodness, mark

NAN = float("nan")


@dataclass(frozen=True)
class Figure:
    """A number over seeds.

    Attributes:
        mean: over the seeds.
        deviation: standard deviation over the seeds (with one degree of freedom less); NaN for a single seed.
        mark: ``"+"`` if it is better than that of the reference by more than the deviation of the difference, ``"-"``
            if it is worse, else empty.
    """

    mean: float
    deviation: float
    mark: str = ""


@dataclass(frozen=True)
class MethodSummary:
    """A row of the table.

    Attributes:
        method: its name.
        learning_rate: the one that was picked.
        seeds: with how many seeds it ran to its end.
        mean: mean over the clients.
        worst_10: mean over the worst tenth of the clients.
        worst_client: name of the client whose mean over the seeds is the worst.
        worst: this client's value.
        angle: fairness angle in radians; NaN for metrics where small values are good.
        conflicts: clients in conflict with the step, per round; NaN for bounds.
        cohort: clients in a round, on average.
        seconds: wall-clock seconds of a run.
        not_finite: of how many seeds the numbers are not finite, and left out.
        without_value: how many clients that other rows count have no value in one of the seeds at least.
    """

    method: str
    learning_rate: float | None
    seeds: int
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
    rows, reference = list[MethodSummary](), dict[str, dict[int, float]]()
    counted = dict[str, list[set[str]]]()
    for method in plan.methods:
        if method not in chosen:
            continue
        runs = {seed: Run(method, chosen[method], seed) for seed in plan.seeds}
        fits = {seed: results[run] for seed, run in runs.items() if run in results}
        numbers, name = numbers_by_seed(fits, measure)
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
                seeds=len(fits),
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
        fits = {seed: results[run] for seed in plan.seeds if (run := Run(method, chosen[method], seed)) in results}
        numbers, _ = numbers_by_seed(fits, measure)
        row = Method(method, tuple(fitted.record for fitted in fits.values()))
        infinite = row.ends_infinite(row.own(measure.metric, measure.reported_on), measure.reported_on)
        bound = method if method in (LOCAL, POOLED) else ""
        found.append(Standing(method, numbers["worst"], numbers["mean"], bound, infinite))
    return found


def _with_value(fitted: Fitted, measure: Measure) -> set[str]:
    return {name for name, value in client_values(fitted, measure).items() if isfinite(value)}


def numbers_by_seed(fits: Mapping[int, Fitted], measure: Measure) -> tuple[dict[str, dict[int, float]], str]:
    """The numbers of the table by seed, those that are not finite left out, and the name of the worst client."""
    name = worst_client(list(fits.values()), measure)
    found: dict[str, dict[int, float]] = {key: {} for key in ("mean", "worst_10", "worst", "angle")}
    for seed, fitted in fits.items():
        summary = summary_of(fitted.record, measure.reported_on, measure.metric, measure.mode)
        value = client_values(fitted, measure).get(name, NAN)
        value = abs(value) if measure.mode == "abs" else value
        for key, number in {**summary, "worst": value}.items():
            if key in found and isfinite(number):
                found[key][seed] = number
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


def _figure(numbers: Mapping[int, float], reference: Mapping[int, float], larger_is_better: bool) -> Figure:
    if not numbers:
        return Figure(NAN, NAN)
    deviation = stdev(numbers.values()) if len(numbers) > 1 else NAN
    return Figure(fmean(numbers.values()), deviation, mark(numbers, reference, larger_is_better))
