# SPDX-License-Identifier: Apache-2.0
"""Pictures over the rounds: mean and worst clients, fairness, loss, conflicts, who was missing; time and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.number_formats import duration
from fl_lightning.report.pictures import (
    BETTER,
    COLORS,
    Picture,
    Spec,
    binned,
    escaped,
    first_words,
    line,
    means_words,
    numbers,
    picture,
    spec,
    stretches,
    thinned,
)
from fl_lightning.report.record import FitRecord, RoundSeries
from fl_lightning.report.runs_of_a_method import Method, records_of, seconds_of, series_of, shown_metrics

_POINTS = 1_000  # of a line
_BINS = 100


def mean_and_worst(methods: Sequence[Method]) -> Picture | None:
    """Mean over the clients and mean of the worst tenth, per metric."""

    def made(metric: str, mode: Mode, names: Sequence[str]) -> Spec | None:
        data = []
        for color, (method, own) in enumerate(zip(methods, names, strict=True)):
            for key, words, dash in (("mean", "mean", "solid"), ("worst_10", "worst 10 %", "dash")):
                name = words if len(methods) == 1 else f"{method.label}, {words}"
                data += _curve(method, color, own, key, name, dash, band=key == "worst_10")
        return spec(data, "round", f"{escaped(metric)} ({BETTER[mode]})", 400, hovermode="x") if data else None

    return _validated(
        methods, "mean-and-worst", "The mean and the worst clients over the rounds", made, " of the worst",
        "Validation after each round. Solid: mean over the clients. Dashed: mean of the worst tenth of them.",
    )  # fmt: skip


def unevenness(methods: Sequence[Method]) -> Picture | None:
    """The fairness angle, or the deviation over clients where no angle is defined."""

    def made(metric: str, mode: Mode, names: Sequence[str]) -> Spec | None:
        key, title = ("angle", "fairness angle (rad)") if mode == "max" else ("std", f"deviation of {escaped(metric)}")
        own = enumerate(zip(methods, names, strict=True))
        data = [trace for k, (method, name) in own for trace in _curve(method, k, name, key, method.label)]
        y = {"rangemode": "tozero"}
        return spec(data, "round", f"{title}, down is fairer", 320, yaxis=y, hovermode="x") if data else None

    return _validated(
        methods, "unevenness", "How unevenly the clients fare over the rounds", made, "",
        "The fairness angle is 0 if all clients have the same value. For metrics where smaller is better, the standard "
        "deviation over the clients is drawn instead.",
    )  # fmt: skip


def training_loss(methods: Sequence[Method]) -> Picture | None:
    """The clients' training loss."""
    return _per_round(
        methods, lambda record: record.rounds.train_loss, "loss", "The clients' training loss", "mean training loss",
        "Mean of the local training losses of the clients in a round, weighted by their samples.",
    )  # fmt: skip


def learning_rate(methods: Sequence[Method]) -> Picture | None:
    """The clients' learning rate, if it changes."""
    if len(_rates(methods)) < 2:
        return None
    return _per_round(
        methods, lambda record: record.rounds.learning_rate, "learning-rate", "The learning rate", "learning rate",
        "The learning rate with which the clients of a round begin.",
    )  # fmt: skip


def learning_rate_in_words(methods: Sequence[Method]) -> str:
    """The learning rate, where it does not change."""
    rates = _rates(methods)
    if rates == {None}:
        return "The clients' optimizers have no single learning rate."
    return f"The clients' learning rate was {rates.pop():g} in all rounds." if len(rates) == 1 else ""


def conflicts(methods: Sequence[Method]) -> Picture | None:
    """Share of the clients whom the step worked against, on the whole model."""

    def shares(record: FitRecord) -> list[float | None]:
        pairs = zip(record.rounds.conflicts, record.rounds.clients, strict=True)
        return [100 * count / clients if clients and not record.is_bound else None for count, clients in pairs]

    return _per_round(
        methods, shares, "conflicts", "Whom the steps worked against", "clients in conflict (%)",
        "A client is in conflict with a step that goes against its own update (their inner product is negative): the "
        "step makes the model worse for it. Drawn is the share of a round's clients, on the whole model.",
        yaxis={"rangemode": "tozero"},
    )  # fmt: skip


def _rates(methods: Sequence[Method]) -> set[float | None]:
    return {rate for record in records_of(methods) for rate in record.rounds.learning_rate}


def _validated(
    methods: Sequence[Method], key: str, title: str, made: Callable[[str, Mode, Sequence[str]], Spec | None],
    banded: str, words: str,
) -> Picture | None:  # fmt: skip
    """A picture per metric of the validations."""
    records = records_of(methods)
    drawn = {metric: made(metric, mode, names) for metric, mode, names in shown_metrics(methods, "val")}
    longest = max((len(series.rounds) for record in records for series in record.metrics), default=0)
    return picture(
        key, title, {metric: each for metric, each in drawn.items() if each is not None}, words,
        _averaged(methods, f", bands{banded} reach from the lowest seed to the highest"),
        f"Of {longest:,} evaluations, {_POINTS:,} are drawn." if longest > _POINTS else "", choose="metric",
    )  # fmt: skip


def _curve(
    method: Method, color: int, metric: str, key: str, name: str, dash: str = "solid", band: bool = True
) -> list[Spec]:
    """Means over the seeds, and where there are several a band from the lowest seed to the highest."""
    series = [series_of(record, metric, "val") for record in method.records]
    found = [dict(zip(s.rounds, s.summaries.get(key, ()), strict=False)) for s in series if s is not None]
    rounds = sorted(set(found[0]).intersection(*found[1:])) if found else []
    rounds = [rounds[k] for k in thinned(len(rounds), _POINTS)]
    columns = [[v for s in found if (v := s[number]) is not None] for number in rounds]
    if not any(columns):
        return []
    curve = line(name, color, rounds, [fmean(column) if column else None for column in columns], dash)
    if not band or len(found) < 2 or not all(columns):
        return [curve]
    y = [*map(max, columns), *map(min, reversed(columns))]
    return [{
        "type": "scatter", "mode": "lines", "x": numbers([*rounds, *reversed(rounds)]), "y": numbers(y),
        "fill": "toself", "hoverinfo": "skip", "fillcolor": f"@c{color % COLORS}+21", "line": {"width": 0},
        "showlegend": False,
    }, curve]  # fmt: skip


def _per_round(
    methods: Sequence[Method], values: Callable[[FitRecord], Sequence[float | None]], key: str, title: str, axis: str,
    words: str, **layout: Spec,
) -> Picture | None:  # fmt: skip
    """A line per method of something that each round has, as means over stretches of rounds and over seeds."""
    data, longest = [], 1
    for color, method in enumerate(methods):
        found = [values(record) for record in method.records if len(record.rounds)]
        if all(value is None for column in found for value in column):
            continue
        length = min(map(len, found))
        curves, width = [binned(column[:length], _BINS)[0] for column in found], binned(found[0][:length], _BINS)[1]
        longest = max(longest, width)
        means = [fmean(k) if (k := [v for v in c if v is not None]) else None for c in zip(*curves, strict=True)]
        first = next(record for record in method.records if len(record.rounds)).rounds.round
        data.append(line(method.label, color, [first[k] + 1 for k in stretches(length, width)], means))
    drawn = {"": spec(data, "round", axis, 300, hovermode="x", **layout)} if data else {}
    return picture(key, title, drawn, words, _averaged(methods), means_words(longest, "Points"))


def _averaged(methods: Sequence[Method], bands: str = "") -> str:
    most = max(len(method.fits) for method in methods)
    return f"Lines are means over {most} seeds{bands}." if most > 1 else ""


_BARS = 120
_PARTS = {"clients' training": 0, "server": 1, "evaluation": 2, "this report": 7}
_ROWS = {"autorange": "reversed", "ticks": "", "showgrid": False}


def missing(methods: Sequence[Method]) -> Picture | None:
    """Drop-outs and errors over the rounds."""
    return _stacked(
        methods, "missing", "Who was missing", "clients per round", "",
        lambda rounds: {"dropped out": (rounds.drop_outs, 5), "left out after an error": (rounds.errors, 1)},
        "Clients that were drawn for a round and did not take part in its step.",
    )  # fmt: skip


def time_per_round(methods: Sequence[Method]) -> Picture | None:
    """Seconds per round, by what they were spent on."""
    return _stacked(
        methods, "time-per-round", "Time per round", "seconds per round", " s",
        lambda rounds: dict(zip(_PARTS, (
            (rounds.training_seconds, 0), (rounds.server_seconds, 1), (rounds.evaluation_seconds, 2),
        ), strict=False)),
    )  # fmt: skip


def time_in_all(methods: Sequence[Method]) -> Picture | None:
    """Seconds of each method, by what they were spent on."""
    found = {m.label: [seconds_of(record) for record in m.records if len(record.rounds)] for m in methods}
    means = {
        label: {part: sum(run.get(part, 0.0) for run in runs) / len(runs) for part in _PARTS}
        for label, runs in found.items()
        if runs
    }
    names = [escaped(label) for label in means]
    data = [_bar(part, names, [row[part] for row in means.values()], color, f"{part}: %{{x:.4~g}} s<extra></extra>")
            for part, color in _PARTS.items()]  # fmt: skip
    shares = [
        f"{label}: {duration(sum(row.values()))}, "
        + ", ".join(f"{100 * value / (sum(row.values()) or 1):.0f} % {part}" for part, value in row.items() if value)
        + "."
        for label, row in list(means.items())[:3]
    ]
    layout = {"barmode": "stack", "legend": {"traceorder": "normal"}, "bargap": 0.35, "yaxis": _ROWS}
    drawn = {"": spec(data, "seconds", "", 150 + 34 * len(names), **layout)} if names else {}
    return picture("time", "Where the time went", drawn, "Wall-clock seconds.", *shares)


def memory(methods: Sequence[Method]) -> Picture | None:
    """Bytes that the fits planned for, by what they are for."""
    plans = {method.label: method.first.memory for method in methods if method.first.memory}
    parts = list(dict.fromkeys(part for plan in plans.values() for part in plan))
    unit, words = _unit(max((value for plan in plans.values() for value in plan.values()), default=0))
    data = []
    for color, (label, plan) in enumerate(plans.items()):
        values, hover = [plan.get(part, 0) / unit for part in parts], f"%{{text}}<extra>{escaped(label)}</extra>"
        text = {"text": [_size(plan.get(part, 0)) for part in parts]}
        position = {"textposition": "auto" if len(plans) <= 3 else "none"}
        names = [escaped(part, 46) for part in parts]
        data.append({**_bar(escaped(label), names, values, color % COLORS, hover), **text, **position})
    totals = ", ".join(f"{label} {_size(sum(plan.values()))}" for label, plan in list(plans.items())[:6])
    height = 110 + len(parts) * (26 + 14 * min(len(plans), 6))
    return picture("memory", "The memory plan",
                   {"": spec(data, words, "", height, yaxis=_ROWS, bargap=0.3)} if plans else {},
                   f"What the fit allocates at most beside the module. In all: {totals}.")  # fmt: skip


def _bar(name: str, rows: Sequence[str], values: Sequence[float], color: int, hover: str) -> Spec:
    return {
        "type": "bar", "orientation": "h", "name": name, "y": list(rows), "x": numbers(values),
        "marker": {"color": f"@c{color}"}, "hovertemplate": f"%{{y}}<br>{hover}",
    }  # fmt: skip


def _stacked(
    methods: Sequence[Method], key: str, title: str, axis: str, unit: str,
    columns: Callable[[RoundSeries], Mapping[str, tuple[Sequence[float], int]]], words: str = "",
) -> Picture | None:  # fmt: skip
    """A stacked bar per stretch of rounds."""
    variants, longest = {}, 1
    for method in methods:
        rounds = method.first.rounds
        found = columns(rounds)
        if len(rounds) < 2 or not any(any(values) for values, _ in found.values()):
            continue
        data = []
        for name, (values, color) in found.items():
            means, width = binned(values, _BARS)
            starts = numbers([rounds.round[k] + 1 for k in stretches(len(values), width)], "i4")
            data.append({
                "type": "bar", "name": name, "x": starts, "y": numbers(means), "width": width,
                "offset": -width / 2 if width == 1 else 0, "marker": {"color": f"@c{color}"},
                "hovertemplate": f"{name}: %{{y:.3~g}}{unit}<extra></extra>",
            })  # fmt: skip
            longest = max(longest, width)
        layout = {"barmode": "stack", "legend": {"traceorder": "normal"}, "bargap": 0, "hovermode": "x"}
        variants[method.label] = spec(data, "round", axis, 300, **layout)
    return picture(key, title, variants, words, means_words(longest, "Bars"), first_words(methods), choose="method")


def _unit(largest: int) -> tuple[int, str]:
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next(((unit, word) for unit, word in units if largest >= unit), (1, "bytes"))


def _size(count: int) -> str:
    unit, word = _unit(count)
    return f"{count:,} bytes" if unit == 1 else f"{count / unit:,.1f} {word}"
