# SPDX-License-Identifier: Apache-2.0
"""The picture of how clients fare: every client's last value under each method."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, sqrt

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.number_formats import STAGES, number
from fl_lightning.report.pictures import (
    BETTER,
    COLORS,
    MAX_NAMED,
    SYMBOLS,
    Picture,
    Spec,
    both_ends,
    escaped,
    hover_name,
    numbers,
    picture,
    spec,
    thin_words,
)
from fl_lightning.report.runs_of_a_method import ClientPoint, Method, Stage, shown_metrics

MAX_DOTS = 2_000  # of a method's clients
_SIDEWAYS = {"max": "right is better", "min": "left is better", "abs": "near 0 is better"}


def fares(methods: Sequence[Method], stage: Stage) -> Picture | None:
    """Every client's last value per method, the worst first."""
    variants, captions = {}, [""]
    for metric, mode, names in shown_metrics(methods, stage):
        everyone = [method.clients(name, stage) for method, name in zip(methods, names, strict=True)]
        if not any(map(_valued, everyone)):
            continue
        most = max(map(len, everyone))
        same = len({tuple(sorted((p.client_id, p.label) for p in found)) for found in everyone if found}) == 1
        named = most <= MAX_NAMED and same
        variants[metric] = (_lines_with_names if named else _sorted_curves)(methods, everyone, metric, mode, stage)
        if len(variants) > 1:
            continue
        worst = "the worst client" if len(methods) == 1 else f"the worst client of {methods[0].label}"
        captions = [
            f"Last {STAGES[stage]} of each client, with the number of its samples in brackets, {worst} on top. "
            "Vertical lines: means over the clients."
            if named
            else f"Last {STAGES[stage]} of each client, for each method from its worst client to its best. The larger "
            "a dot, the more samples the client has. Horizontal lines: means over the clients.",
            thin_words(most, MAX_DOTS),
            "With several seeds, a client's mean over them." if any(len(m.fits) > 1 for m in methods) else "",
        ]
    return picture("fares", "Who fares how", variants, *captions, choose="metric")


def _lines_with_names(
    methods: Sequence[Method], everyone: Sequence[list[ClientPoint]], metric: str, mode: Mode, stage: Stage
) -> Spec:
    """One line per client with its name and size; a dot per method."""
    points = list(map(_valued, everyone))
    order = next(found for found, some in zip(everyone, points, strict=True) if some)
    place = {point.client_id: row for row, point in enumerate(order)}
    spans: dict[int, list[float]] = {}
    for point in (point for found in points for point in found):
        spans.setdefault(place[point.client_id], []).append(point.value)
    data = [{
        "type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False,
        "x": numbers([x for values in spans.values() for x in (min(values), max(values), None)]),
        "y": numbers([y for row in spans for y in (row, row, None)]), "line": {"color": "@grid", "width": 3},
    }] if len(methods) > 1 else []  # fmt: skip
    for color, (method, found) in enumerate(zip(methods, points, strict=True)):
        size = 14.0 - 5.0 * color / (len(methods) - 1) if len(methods) > 1 else 11.0  # equal values do not hide others
        rows, sizes = [place[point.client_id] for point in found], [size] * len(found)
        data += _method(method, color, found, [], rows, sizes, (-0.6, len(order) - 0.4), metric, stage)
    ticks = [f"{escaped(point.label, 22)} ({point.size:,})" for point in order]
    axis = {"tickmode": "array", "tickvals": list(range(len(order))), "ticktext": ticks, "zeroline": False,
            "range": [len(order) - 0.4, -0.6]}  # fmt: skip
    return _spec(data, f"{escaped(metric)} ({_SIDEWAYS[mode]})", "", 130 + 22 * len(order), methods, yaxis=axis)


def _sorted_curves(
    methods: Sequence[Method], everyone: Sequence[list[ClientPoint]], metric: str, mode: Mode, stage: Stage
) -> Spec:
    """A dot per client, for each method from its worst client to its best."""
    points = list(map(_valued, everyone))
    largest = max(point.size for found in points for point in found) or 1
    data = []
    for color, (method, found) in enumerate(zip(methods, points, strict=True)):
        chosen = both_ends(len(found), MAX_DOTS)
        scale = 9.0 if len(found) <= 200 else 5.0
        sizes = [3.0 + scale * sqrt(found[k].size / largest) for k in chosen]
        shown, places, ends = [found[k] for k in chosen], [k + 1 for k in chosen], (0.5, len(found) + 0.5)
        data += _method(method, color, shown, places, [], sizes, ends, metric, stage, found)
    x = {"showgrid": False, "zeroline": False}
    return _spec(data, "clients, the worst first", f"{escaped(metric)} ({BETTER[mode]})", 430, methods, xaxis=x)


def _valued(found: Sequence[ClientPoint]) -> list[ClientPoint]:
    return [point for point in found if not isnan(point.value)]


def _spec(data: list[Spec], x: str, y: str, height: int, methods: Sequence[Method], **axes: Spec) -> Spec:
    legend = {"legend": {"itemsizing": "constant"}, "showlegend": len(methods) > 1}
    return spec(data, x, y, height, hovermode="closest", **legend, **axes)


def _method(
    method: Method, color: int, points: Sequence[ClientPoint], x: Sequence[float], y: Sequence[float],
    sizes: Sequence[float], ends: tuple[float, float], metric: str, stage: Stage,
    counted: Sequence[ClientPoint] | None = None,
) -> list[Spec]:  # fmt: skip
    """The dots of one method, with values along the axis that has no places, and a line at their mean."""
    if not points:
        return []
    values, upright = [point.value for point in points], not x
    everyone = points if counted is None else counted
    mean = sum(point.value for point in everyone) / len(everyone)
    texts = [
        f"<b>{hover_name(p.label)}</b><br>{p.size:,} {STAGES[stage]} and {p.trained:,} training samples" for p in points
    ]
    look, name, axis = f"@c{color % COLORS}", escaped(method.label), "x" if upright else "y"
    dots = {
        "type": "scatter", "mode": "markers", "name": name, "legendgroup": f"m{color}", "x": numbers(x or values),
        "y": numbers(y or values), "text": texts,
        "hovertemplate": f"%{{text}}<br>{escaped(metric)} %{{{axis}:.4~g}}<extra>{name}</extra>",
        "marker": {"color": look, "size": numbers(sizes), "symbol": SYMBOLS[color % len(SYMBOLS)], "opacity": 0.9,
                   "line": {"width": 0.5, "color": "@paper"}},
    }  # fmt: skip
    along, level = numbers(ends), numbers([mean, mean])
    return [dots, {
        "type": "scatter", "mode": "lines", "showlegend": False, "legendgroup": f"m{color}",
        "x": level if upright else along, "y": along if upright else level,
        "hovertemplate": f"mean of {name}: {number(mean)}<extra></extra>",
        "line": {"color": look, "width": 1.5, "dash": "dot"},
    }]  # fmt: skip
