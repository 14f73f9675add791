# SPDX-License-Identifier: Apache-2.0
"""Pictures over the rounds: mean and worst clients, fairness, loss, conflicts, who was missing, and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from plotly import graph_objects as go

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.pictures import (
    BETTER,
    Picture,
    color_of,
    escaped,
    figure,
    first_words,
    picture,
    thinned,
)
from fl_lightning.report.record import FitRecord, RoundSeries
from fl_lightning.report.runs_of_a_method import Method, records_of, series_of, shown_metrics

_POINTS = 1_000  # of a line


def mean_and_worst(methods: Sequence[Method]) -> Picture | None:
    """Mean over the clients and mean of the worst tenth, per metric."""

    def curves(method: Method, color: str, metric: str, mode: Mode) -> list[Any]:
        label = "" if len(methods) == 1 else f"{method.label}, "
        mean = _curve(method, color, metric, "mean", f"{label}mean", band=False)
        return mean + _curve(method, color, metric, "worst_10", f"{label}worst 10 %", "dash")

    return _validated(
        methods, "mean-and-worst", "The mean and the worst clients over the rounds", 400, curves,
        lambda metric, mode: f"{escaped(metric)} ({BETTER[mode]})", " of the worst",
        "Validation after each round. Solid: mean over the clients. Dashed: mean of the worst tenth of them.",
    )  # fmt: skip


def unevenness(methods: Sequence[Method]) -> Picture | None:
    """The fairness angle, or the deviation over clients where no angle is defined."""

    def curves(method: Method, color: str, metric: str, mode: Mode) -> list[Any]:
        return _curve(method, color, metric, "angle" if mode == "max" else "std", method.label)

    def axis(metric: str, mode: Mode) -> str:
        return f"{'fairness angle (rad)' if mode == 'max' else f'deviation of {escaped(metric)}'}, down is fairer"

    return _validated(
        methods, "unevenness", "How unevenly the clients fare over the rounds", 320, curves, axis, "",
        "The fairness angle is 0 if all clients have the same value. For metrics where smaller is better, the standard "
        "deviation over the clients is drawn instead.", yaxis={"rangemode": "tozero"},
    )  # fmt: skip


def training_loss(methods: Sequence[Method]) -> Picture | None:
    """The clients' training loss."""
    return _per_round(
        methods, lambda record: record.rounds.train_loss, "loss", "The clients' training loss", "mean training loss",
        "Mean of the local training losses of the clients in a round, weighted by their samples.",
    )  # fmt: skip


def learning_rate(methods: Sequence[Method]) -> Picture | None:
    """The clients' learning rate, if it changes."""
    if len({rate for record in records_of(methods) for rate in record.rounds.learning_rate}) < 2:
        return None
    return _per_round(
        methods, lambda record: record.rounds.learning_rate, "learning-rate", "The learning rate", "learning rate",
        "The learning rate with which the clients of a round begin.",
    )  # fmt: skip


def conflicts(methods: Sequence[Method]) -> Picture | None:
    """Share of the clients whom the step worked against, on the whole model."""

    def shares(record: FitRecord) -> list[float | None]:
        pairs = zip(record.rounds.conflicts, record.rounds.clients, strict=True)
        known = not record.is_bound
        return [100 * count / clients if count is not None and clients and known else None for count, clients in pairs]

    return _per_round(
        methods, shares, "conflicts", "Whom the steps worked against", "clients in conflict (%)",
        "A client is in conflict with a step that goes against its own update (their inner product is negative): the "
        "step makes the model worse for it. Drawn is the share of a round's clients, on the whole model.",
    )  # fmt: skip


def missing(methods: Sequence[Method]) -> Picture | None:
    """Drop-outs and errors over the rounds."""
    return _stacked(
        methods, "missing", "Who was missing", "clients per round",
        lambda rounds: {"dropped out": rounds.drop_outs, "left out after an error": rounds.errors},
        "Clients that were drawn for a round and did not take part in its step.",
    )  # fmt: skip


def time_per_round(methods: Sequence[Method]) -> Picture | None:
    """Seconds per round, by what they were spent on."""
    return _stacked(
        methods, "time-per-round", "Time per round", "seconds per round",
        lambda rounds: {"clients' training": rounds.training_seconds, "server": rounds.server_seconds,
                        "evaluation": rounds.evaluation_seconds},
    )  # fmt: skip


def _validated(
    methods: Sequence[Method], key: str, title: str, height: int, curves: Callable[[Method, str, str, Mode], list[Any]],
    axis: Callable[[str, Mode], str], banded: str, words: str, **layout: Any,
) -> Picture | None:  # fmt: skip
    """A picture per metric of the validations."""
    drawn = {}
    for metric, mode, names in shown_metrics(methods, "val"):
        own = enumerate(zip(methods, names, strict=True))
        traces = [trace for place, (method, name) in own for trace in curves(method, color_of(place), name, mode)]
        if traces:
            drawn[metric] = figure(traces, "round", axis(metric, mode), height, hovermode="x unified", **layout)
    longest = max((len(series.rounds) for record in records_of(methods) for series in record.metrics), default=0)
    return picture(
        key, title, drawn, words, _averaged(methods, f", bands{banded} reach from the lowest seed to the highest"),
        f"Of {longest:,} evaluations, {_POINTS:,} are drawn." if longest > _POINTS else "", choose="metric",
    )  # fmt: skip


def _curve(
    method: Method, color: str, metric: str, key: str, name: str, dash: str = "solid", band: bool = True
) -> list[Any]:
    """Means over the seeds, and where there are several a band from the lowest seed to the highest."""
    series = [series_of(record, metric, "val") for record in method.records]
    found = [dict(zip(s.rounds, s.summaries.get(key, ()), strict=False)) for s in series if s is not None]
    rounds = sorted(set(found[0]).intersection(*found[1:])) if found else []
    rounds = [rounds[k] for k in thinned(len(rounds), _POINTS)]
    columns = [[v for s in found if (v := s[number]) is not None] for number in rounds]
    if not any(columns):
        return []
    curve = _line(name, color, rounds, [fmean(column) if column else None for column in columns], dash)
    if not band or len(found) < 2 or not all(columns):
        return [curve]
    y = [*map(max, columns), *map(min, reversed(columns))]
    return [go.Scatter(
        x=[*rounds, *reversed(rounds)], y=y, mode="lines", line={"color": color, "width": 0}, fill="toself",
        opacity=0.25, hoverinfo="skip", showlegend=False,
    ), curve]  # fmt: skip


def _line(name: str, color: str, x: Sequence[int], y: Sequence[float | None], dash: str = "solid") -> Any:
    mode = "lines" if len(x) > 1 else "markers"
    return go.Scatter(x=x, y=y, mode=mode, name=escaped(name), line={"color": color, "dash": dash})


def _per_round(
    methods: Sequence[Method], values: Callable[[FitRecord], Sequence[float | None]], key: str, title: str, axis: str,
    words: str,
) -> Picture | None:  # fmt: skip
    """A line per method of something that each round has, as means over stretches of rounds and over seeds."""
    lines = []
    for place, method in enumerate(methods):
        records = [record for record in method.records if len(record.rounds)]
        found = [values(record) for record in records]
        shown = thinned(min(map(len, found), default=0), _POINTS)
        known = [[value for column in found if (value := column[k]) is not None] for k in shown]
        if any(known):
            means = [fmean(column) if column else None for column in known]
            rounds = [records[0].rounds.round[k] + 1 for k in shown]
            lines.append(_line(method.label, color_of(place), rounds, means))
    y = {"rangemode": "tozero"}
    drawn = {"": figure(lines, "round", axis, 300, hovermode="x unified", yaxis=y)} if lines else {}
    return picture(key, title, drawn, words, _averaged(methods), _few_drawn(methods))


def _averaged(methods: Sequence[Method], bands: str = "") -> str:
    most = max(len(method.fits) for method in methods)
    return f"Lines are means over {most} seeds{bands}." if most > 1 else ""


def _stacked(
    methods: Sequence[Method], key: str, title: str, axis: str,
    columns: Callable[[RoundSeries], Mapping[str, Sequence[float]]], words: str = "",
) -> Picture | None:  # fmt: skip
    """Areas on top of one another."""
    variants = {}
    for method in methods:
        rounds = method.first.rounds
        found, shown = columns(rounds), thinned(len(rounds), _POINTS)
        if len(rounds) < 2 or not any(map(any, found.values())):
            continue
        x = [rounds.round[k] + 1 for k in shown]
        areas = [
            go.Scatter(x=x, y=[values[k] for k in shown], name=name, mode="lines", stackgroup="all",
                       line={"color": color_of(place), "width": 0})
            for place, (name, values) in enumerate(found.items())
        ]  # fmt: skip
        variants[method.label] = figure(areas, "round", axis, 300, hovermode="x unified")
    return picture(key, title, variants, words, _few_drawn(methods), first_words(methods), choose="method")


def _few_drawn(methods: Sequence[Method]) -> str:
    longest = max((len(record.rounds) for record in records_of(methods)), default=0)
    return f"Of {longest:,} rounds, {_POINTS:,} are drawn." if longest > _POINTS else ""
