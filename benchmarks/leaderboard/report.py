# SPDX-License-Identifier: Apache-2.0
"""The tables in Markdown: of one suite, and the overview of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan, nan
from pathlib import Path

from benchmarks.leaderboard.bootstrap import Interval
from benchmarks.leaderboard.standing import COLUMNS, OTHERS, Row, Standing, columns_of
from benchmarks.leaderboard.suites import Suite
from benchmarks.leaderboard.traffic import Traffic
from fl_lightning.report.conclusion import LOCAL
from fl_lightning.report.number_formats import duration, percent
from fl_lightning.report.repetitions import Estimate
from fl_lightning.report.tables import MethodSummary

PAGE = Path(__file__).parents[2] / "docs" / "leaderboard.md"
OVERVIEW = {
    "fmnist-pat1": "Pat-1", "fmnist-pat2": "Pat-2", "fmnist-dir": "Dirichlet", "cifar-pat2": "CIFAR-10",
    "digits": "digits", "office": "Office",
}  # fmt: skip
"""Suites whose methods are compared in one table, and their columns."""
BUSY_SUITES, BUSY_METHODS = {"adult-crossings"}, {"EAGLE", "FairGrad", "FedFB"}
"""Whose seconds were taken beside other work: they are no more than bounds."""


def tables(standing: Standing, traffic: Mapping[str, Traffic], alone: MethodSummary | None = None) -> str:
    """What a suite has found so far.

    Args:
        standing: its finished runs.
        traffic: by method, what clients send and receive, as far as it was counted.
        alone: what clients reach alone, if that has run.
    """
    suite, plan, rows = standing.suite, standing.plan, standing.rows
    done, failures = len(standing.results), standing.failures
    repeated = "seeds" if plan.divisions == 1 else "divisions"
    state = "complete" if done + failures == len(plan) else f"{done} of {len(plan)} runs are finished"
    state += f"; {failures} failed" if failures else ""
    parts = [
        f"# {suite.title}",
        f"`python -m benchmarks.leaderboard run {suite.name} --data-root DIR`",
        f"{suite.telling[0].upper()}{suite.telling[1:]}. {suite.rounds} rounds; {state}.",
    ]
    if rows:
        parts[-1] += f" They took {_bound(suite)}{duration(standing.seconds())} of one core."
    if len(rows) > 1:
        parts.append(f"![Differences of the methods to {standing.plan.methods[0]}, with intervals]({suite.name}.png)")
    if rows:
        parts += [
            _accuracies(rows, len(plan.learning_rates), repeated),
            _alone(suite, alone),
            _differences(rows, repeated),
            _costs(suite, rows, traffic),
        ]
    if standing.missing:
        parts.append(f"Not run yet: {', '.join(standing.missing)}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _alone(suite: Suite, found: MethodSummary | None) -> str:
    if suite.bounds == "local":
        return ""  # a row of the table
    if suite.clients_of:
        return f"What these clients reach alone, [{suite.clients_of}]({suite.clients_of}.md) says."
    if found is None:
        return "What each client reaches alone has not run yet."
    number = "one division" if found.repetitions == 1 else f"{found.repetitions} divisions"
    return (
        f"Alone, with as many passes as a client of every round and the learning rate {found.learning_rate:g}, clients "
        f"reach {_figure(found.mean)} in the mean; the worst tenth {_figure(found.worst_10)}, the worst client "
        f"{_figure(found.worst)} ({number})."
    )


def overview(standings: Sequence[Standing], alone: Mapping[str, MethodSummary | None]) -> str:
    """Where the tables of all suites are, and the methods beside each other.

    Args:
        standings: of all suites.
        alone: by suite, what clients reach alone, as far as that has run.
    """
    suites = [
        [
            f"[{each.suite.title}](../benchmarks/leaderboard/results/{each.suite.name}.md)",
            f"{len(each.results)} of {len(each.plan)}",
            str(each.failures),
            f"{_bound(each.suite)}{duration(each.seconds())}",
        ]
        for each in standings
    ]
    chosen = {OVERVIEW[each.suite.name]: each.rows for each in standings if each.suite.name in OVERVIEW}
    methods: dict[str, dict[str, str]] = {}
    lonely: dict[str, str] = {}
    for column, rows in chosen.items():
        tenth = ("accuracy", "worst 10 %") in columns_of(rows)
        for row in rows:
            methods.setdefault(row.accuracy.method, {})[column] = _mean_and_worst(row, tenth)
        own = next((alone.get(name) for name, title in OVERVIEW.items() if title == column), None)
        if own is not None:
            numbers = [own.mean.mean, (own.worst_10 if tenth else own.worst).mean]
            lonely[column] = " ".join(f"{number:.3f}".removeprefix("0") for number in numbers)
    if lonely:
        methods[LOCAL] = lonely
    lines = [[method, *(cells.get(column, "") for column in chosen)] for method, cells in methods.items()]
    head = ["tables", "finished runs", "failed", "time of one core"]
    return _markdown(head, suites) + "\n\n" + _markdown(["method", *chosen], lines)


def _mean_and_worst(row: Row, tenth: bool) -> str:
    """Mean and worst tenth, or worst client; with the sign of a difference that is no noise."""
    figures = {"mean": row.accuracy.mean, "worst 10 %": row.accuracy.worst_10 if tenth else row.accuracy.worst}
    texts = []
    for statistic, figure in figures.items():
        found = row.differences.get(("accuracy", statistic))
        sign = "" if found is None or found.is_noise else "+" if found.difference > 0 else "-"
        texts.append(f"{figure.mean:.3f}{sign}".removeprefix("0"))
    return " ".join(texts)


def _accuracies(rows: Sequence[Row], rates: int, repeated: str) -> str:
    others = list(dict.fromkeys(name for row in rows for name in row.others))
    head = [
        "method", "lr", repeated, "mean", "worst 10 %", "worst client", "angle", "conflicts", "AUROC",
        "AUROC, worst 10 %", *others,
    ]  # fmt: skip
    lines = []
    for row in rows:
        one = row.accuracy
        waiting = rates - row.tried - row.failed
        part = f" ({waiting} of {rates} to come)" if waiting else ""
        lines.append(
            [
                one.method,
                f"{one.learning_rate:g}{part}",
                str(one.repetitions),
                _figure(one.mean),
                _figure(one.worst_10),
                _figure(one.worst),
                _figure(one.angle),
                "" if isnan(one.conflicts) else percent(one.conflicts),
                _figure(row.auroc.mean),
                _figure(row.auroc.worst_10),
                *(_other(name, row.others.get(name, nan)) for name in others),
            ]
        )
    return _markdown(head, lines)


def _differences(rows: Sequence[Row], repeated: str) -> str:
    columns = columns_of(rows)
    if not columns:
        return ""
    head = ["minus FedAvg", repeated, *(COLUMNS[column] for column in columns)]
    lines = [
        [
            row.accuracy.method,
            str(row.accuracy.repetitions),
            *(_interval(row.differences.get(each)) for each in columns),
        ]
        for row in rows
        if row.differences
    ]
    return _markdown(head, lines)


def _costs(suite: Suite, rows: Sequence[Row], traffic: Mapping[str, Traffic]) -> str:
    head = ["method", "rounds to 95 %", "client-seconds to 95 %", "seconds of a run", "sends, MB", "receives, MB"]
    lines = []
    for row in rows:
        sent, bound = traffic.get(row.accuracy.method), _bound(suite, row.accuracy.method)
        lines.append(
            [
                row.accuracy.method,
                "never" if isnan(row.rounds) else f"{row.rounds:.0f}",
                "" if isnan(row.client_seconds) else f"{bound}{row.client_seconds:.1f}",
                "" if isnan(row.seconds) else f"{bound}{row.seconds:.0f}",
                *(["", ""] if sent is None else [f"{sent.up / 1e6:.3g}", f"{sent.down / 1e6:.3g}"]),
            ]
        )
    return _markdown(head, lines)


def _bound(suite: Suite, method: str = "") -> str:
    return "≤ " if suite.name in BUSY_SUITES or method in BUSY_METHODS else ""


def _figure(figure: Estimate) -> str:
    if isnan(figure.mean):
        return ""
    return _number(figure.mean) + ("" if isnan(figure.deviation) else f" ± {figure.deviation:.3f}")


def _number(value: float) -> str:
    return "" if isnan(value) else f"{value:.3f}"


def _other(name: str, value: float) -> str:
    return percent(value) if name == OTHERS["test_conflicts"] and not isnan(value) else _number(value)


def _interval(found: Interval | None) -> str:
    """In bold where the interval does not hold 0."""
    if found is None:
        return ""
    bold = "" if found.is_noise else "**"
    return f"{bold}{found.difference:+.3f}{bold} [{found.low:+.3f}, {found.high:+.3f}]"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])
