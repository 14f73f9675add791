# SPDX-License-Identifier: Apache-2.0
"""Pictures of who was missing, where the time went, and what memory the fits needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fl_lightning.report.number_formats import duration
from fl_lightning.report.pictures import (
    COLORS,
    Picture,
    Spec,
    binned,
    escaped,
    first_words,
    means_words,
    numbers,
    picture,
    spec,
    stretches,
)
from fl_lightning.report.record import RoundSeries
from fl_lightning.report.runs_of_a_method import Method, seconds_of

_BINS = 120
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
    """A bar in each row."""
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
            means, width = binned(values, _BINS)
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
