# SPDX-License-Identifier: Apache-2.0
"""The picture of how clients fare: every client's last value under each method."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, sqrt
from statistics import fmean
from typing import Any

import numpy as np

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.number_formats import STAGES
from fl_lightning.report.pictures import (
    BETTER,
    MAX_NAMED,
    Picture,
    both_ends,
    color_of,
    escaped,
    figure,
    hover_name,
    picture,
    thin_words,
)
from fl_lightning.report.runs_of_a_method import ClientPoint, Method, Stage, shown_metrics

MAX_DOTS = 2_000  # of a method's clients
_SIDEWAYS = {"max": "right is better", "min": "left is better", "abs": "near 0 is better"}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "pentagon", "star")


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
        variants[metric] = _dots(methods, everyone, metric, mode, stage, named)
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


def _dots(
    methods: Sequence[Method], everyone: Sequence[list[ClientPoint]], metric: str, mode: Mode, stage: Stage, named: bool
) -> Any:
    """A dot per client and method: in a row with the client's name, or from each method's worst client to its best."""
    points = list(map(_valued, everyone))
    order = next(found for found, some in zip(everyone, points, strict=True) if some)
    row = {point.client_id: place for place, point in enumerate(order)}
    largest = max(point.size for found in points for point in found) or 1
    if named:
        made = figure([], f"{escaped(metric)} ({_SIDEWAYS[mode]})", "", 130 + 22 * len(order))
        ticks = [f"{escaped(point.label, 22)} ({point.size:,})" for point in order]
        made.update_yaxes(tickvals=list(range(len(order))), ticktext=ticks, range=[len(order) - 0.4, -0.6])
    else:
        made = figure([], "clients, the worst first", f"{escaped(metric)} ({BETTER[mode]})", 430)
    for place, (method, found) in enumerate(zip(methods, points, strict=True)):
        if not found:
            continue
        chosen = both_ends(len(found), MAX_DOTS)
        shown = [found[k] for k in chosen]
        x: list[float] = [point.value for point in shown]
        y: list[float] = [row[point.client_id] for point in shown]
        size = [14.0 - 5.0 * place / len(methods)] * len(shown)  # equal values do not hide others
        if not named:
            x, y, scale = [k + 1 for k in chosen], x, 9.0 if len(found) <= 200 else 5.0
            size = [3.0 + scale * sqrt(point.size / largest) for point in shown]
        color, symbol = color_of(place), _SYMBOLS[(place + place // 8) % 8]  # no other method has both
        made.add_scatter(
            x=np.asarray(x, np.float32), y=np.asarray(y, np.float32), mode="markers", name=escaped(method.label),
            hovertext=[_hover_text(point, metric, stage) for point in shown], hoverinfo="text+name",
            marker={"color": color, "symbol": symbol, "size": np.asarray(size, np.float32), "opacity": 0.9},
        )  # fmt: skip
        line = {"color": color, "width": 1.5, "dash": "dot"}
        (made.add_vline if named else made.add_hline)(fmean(point.value for point in found), line=line)
    return made.update_layout(showlegend=len(methods) > 1, legend_itemsizing="constant")


def _valued(found: Sequence[ClientPoint]) -> list[ClientPoint]:
    return [point for point in found if not isnan(point.value)]


def _hover_text(point: ClientPoint, metric: str, stage: Stage) -> str:
    samples = f"{point.size:,} {STAGES[stage]} and {point.trained:,} training samples"
    return f"<b>{hover_name(point.label)}</b><br>{samples}<br>{escaped(metric)} {point.value:.4g}"
