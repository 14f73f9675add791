# SPDX-License-Identifier: Apache-2.0
"""The picture of how clients fare: every client's last value under each method."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.number_formats import STAGES, number
from fl_lightning.report.pictures import (
    COLORS,
    MAX_DOTS,
    MAX_NAMED,
    Picture,
    Spec,
    both_ends,
    escaped,
    hover_name,
    layout,
    numbers,
    sentences,
    thin_words,
)
from fl_lightning.report.runs_of_a_method import ClientPoint, Method, Stage, metrics_of
from fl_lightning.report.style import SYMBOLS

_LEGEND = {"itemsizing": "constant"}
_BETTER = {"max": "right is better", "min": "left is better", "abs": "near 0 is better"}
_BETTER_UP = {"max": "up is better", "min": "down is better", "abs": "near 0 is better"}


def fares(methods: Sequence[Method], stage: Stage) -> Picture | None:
    """Every client's last value per method, the worst first."""
    records = [record for method in methods for record in method.records]
    variants, captions = {}, list[str]()
    for metric, mode in metrics_of(records, stage).items():
        points = [method.points(metric, stage) for method in methods]
        if not any(points):
            continue
        most = max(map(len, points))
        same = len({tuple(sorted((p.client_id, p.name) for p in found)) for found in points if found}) == 1
        named = most <= MAX_NAMED and same
        variants[metric] = (_lines_with_names if named else _sorted_curves)(methods, points, metric, mode, stage)
        if not captions:
            thin = thin_words(most, MAX_DOTS, "clients")
            seeds = "With several seeds, a client's mean over them." if any(len(m.records) > 1 for m in methods) else ""
            captions = [_how_to_read(methods, stage, named), thin, seeds]
    if not variants:
        return None
    return Picture("fares", "Who fares how", variants, sentences(*captions), "metric")


def _how_to_read(methods: Sequence[Method], stage: Stage, named: bool) -> str:
    if named:
        worst = "the worst client" if len(methods) == 1 else f"the worst client of {methods[0].label}"
        return (
            f"Last {STAGES[stage]} of each client, with the number of its samples in brackets, {worst} on top. "
            "Vertical lines: means over the clients."
        )
    return (
        f"Last {STAGES[stage]} of each client, for each method from its worst client to its best. The larger a dot, "
        "the more samples the client has. Horizontal lines: means over the clients."
    )


def _lines_with_names(
    methods: Sequence[Method], points: Sequence[list[ClientPoint]], metric: str, mode: Mode, stage: Stage
) -> Spec:
    """One line per client with its name and size; a dot per method."""
    order = next(found for found in points if found)
    place = {point.client_id: row for row, point in enumerate(order)}
    spans: dict[int, list[float]] = {}
    for found in points:
        for point in found:
            spans.setdefault(point.client_id, []).append(point.value)
    ends = [(place[c], min(v), max(v)) for c, v in spans.items() if len(v) > 1]
    data: list[Spec] = []
    if ends:
        data.append({
            "type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False,
            "x": numbers([x for _, low, high in ends for x in (low, high, None)]),
            "y": numbers([y for row, _, _ in ends for y in (row, row, None)]),
            "line": {"color": "@grid", "width": 3},
        })  # fmt: skip
    for color, (method, found) in enumerate(zip(methods, points, strict=True)):
        if not found:
            continue
        size = 14.0 - 5.0 * color / max(1, len(methods) - 1)  # equal values do not hide one another
        data += [
            _mean_line(method, color, found, (-0.6, len(order) - 0.4), upright=True),
            _dots(method, color, found, [p.value for p in found], [place[p.client_id] for p in found], metric, "x",
                  [size if len(methods) > 1 else 11.0] * len(found), stage),
        ]  # fmt: skip
    ticks = [f"{escaped(point.label, 22)} ({point.size:,})" for point in order]
    axis = {"tickmode": "array", "tickvals": list(range(len(order))), "ticktext": ticks, "zeroline": False,
            "range": [len(order) - 0.4, -0.6], "automargin": True, "showgrid": True}  # fmt: skip
    spec = layout(f"{escaped(metric)} ({_BETTER[mode]})", "", yaxis=axis)
    return {
        "data": data,
        "layout": {**spec, "hovermode": "closest", "legend": _LEGEND, "showlegend": len(methods) > 1},
        "height": 130 + 22 * len(order),
    }


def _sorted_curves(
    methods: Sequence[Method], points: Sequence[list[ClientPoint]], metric: str, mode: Mode, stage: Stage
) -> Spec:
    """A dot per client, for each method from its worst client to its best."""
    largest = max(point.size for found in points for point in found) or 1
    data = []
    for color, (method, found) in enumerate(zip(methods, points, strict=True)):
        if not found:
            continue
        chosen = both_ends(len(found), MAX_DOTS)
        shown = [found[k] for k in chosen]
        sizes = [3.0 + (9.0 if len(found) <= 200 else 5.0) * sqrt(point.size / largest) for point in shown]
        data += [
            _dots(method, color, shown, [k + 1 for k in chosen], [p.value for p in shown], metric, "y", sizes, stage),
            _mean_line(method, color, found, (0.5, len(found) + 0.5), upright=False),
        ]
    x = {"showgrid": False, "zeroline": False}
    spec = layout("clients, the worst first", f"{escaped(metric)} ({_BETTER_UP[mode]})", xaxis=x)
    return {
        "data": data,
        "layout": {**spec, "hovermode": "closest", "legend": _LEGEND, "showlegend": len(methods) > 1},
        "height": 430,
    }


def _dots(
    method: Method, color: int, points: Sequence[ClientPoint], x: Sequence[float], y: Sequence[float], metric: str,
    value: str, sizes: Sequence[float], stage: Stage,
) -> Spec:  # fmt: skip
    texts = [
        f"<b>{hover_name(p.label)}</b><br>{p.size:,} {STAGES[stage]} and {p.trained:,} training samples" for p in points
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escaped(method.label),
        "legendgroup": f"m{color}",
        "x": numbers(x),
        "y": numbers(y),
        "text": texts,
        "hovertemplate": f"%{{text}}<br>{escaped(metric)} %{{{value}:.4~g}}<extra>{escaped(method.label)}</extra>",
        "marker": {
            "color": f"@c{color % COLORS}",
            "size": numbers(sizes),
            "symbol": SYMBOLS[color % len(SYMBOLS)],
            "opacity": 0.9,
            "line": {"width": 0.5, "color": "@paper"},
        },
    }


def _mean_line(
    method: Method, color: int, points: Sequence[ClientPoint], ends: tuple[float, float], upright: bool
) -> Spec:
    mean = sum(point.value for point in points) / len(points)
    along, level = numbers(ends), numbers([mean, mean])
    return {
        "type": "scatter",
        "mode": "lines",
        "showlegend": False,
        "legendgroup": f"m{color}",
        "x": level if upright else along,
        "y": along if upright else level,
        "hovertemplate": f"mean of {escaped(method.label)}: {number(mean)}<extra></extra>",
        "line": {"color": f"@c{color % COLORS}", "width": 1.5, "dash": "dot"},
    }
