# SPDX-License-Identifier: Apache-2.0
"""Pictures of clients: how they fare under each method, how they fared over the rounds, and what data they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isnan, sqrt
from statistics import fmean
from typing import Any

import numpy as np

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.number_formats import STAGES, plural
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
from fl_lightning.report.record import FitRecord
from fl_lightning.report.runs_of_a_method import (
    ClientPoint,
    Method,
    Stage,
    label_of,
    records_of,
    repetition_label,
    series_of,
    shown_metrics,
    worst_first,
)

_SIDEWAYS = {"max": "right is better", "min": "left is better", "abs": "near 0 is better"}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "pentagon", "star")
MAX_DOTS, MAX_ROWS = 2_000, 400  # of a method's clients
_DIVISIONS = 5  # of the data that are drawn


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
        made = figure(f"{escaped(metric)} ({_SIDEWAYS[mode]})", "", 130 + 22 * len(order))
        ticks = [f"{escaped(point.label, 22)} ({point.size:,})" for point in order]
        made.update_yaxes(tickvals=list(range(len(order))), ticktext=ticks, range=[len(order) - 0.4, -0.6])
    else:
        made = figure("clients, the worst first", f"{escaped(metric)} ({BETTER[mode]})", 430)
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


def over_time(methods: Sequence[Method]) -> Picture | None:
    """Each client's value in the validations that the record has."""
    variants, captions = {}, [""]
    for method in methods:
        record = method.first
        validations = [values for values in record.evaluations if values.stage == "val"]
        metric = next((name for name, *_ in shown_metrics([method], "val")), None)
        if len(validations) < 2 or metric is None:
            continue
        known = set(validations[-1].client_ids)
        order = [client for client in worst_first(record) if client in known]
        found = [dict(zip(v.client_ids, v.values.get(metric, ()), strict=False)) for v in validations]
        variants[method.label] = _heat_map(
            record, order, [[column.get(client) for column in found] for client in order],
            [values.round for values in validations], "round", escaped(metric), "round %{x}: %{z:.4~g}",
        )  # fmt: skip
        series = series_of(record, metric, "val")
        count, most = 0 if series is None else len(series.rounds), max(len(method.fits) for method in methods)
        captions = [
            f"{metric} in validation, one row per client: the row on top is the client that is worst off at the end.",
            "" if most == 1 else f"Of {plural(most, 'seed')}, the first is drawn.",
            f"Drawn are {len(validations)} of {count:,} evaluations." if len(validations) < count else "",
            thin_words(len(order), MAX_ROWS),
        ]
    drawn = [made.data[0].z for made in variants.values()]
    ends = [float(end(z)) for z in drawn for end in (np.nanmin, np.nanmax) if not np.isnan(z).all()]
    for made in variants.values() if ends else ():
        made.update_traces(zmin=min(ends), zmax=max(ends))  # methods have the same colours
    return picture("over-time", "Every client over the rounds", variants, *captions, choose="method")


def partition(methods: Sequence[Method]) -> Picture | None:
    """How many samples of which classes the clients hold."""
    divisions: dict[Any, FitRecord] = {}
    for record in records_of(methods):
        if record.class_counts:
            divisions.setdefault((record.client_names, record.class_names, record.class_counts), record)
    found, variants = list(divisions.values())[:_DIVISIONS], {}
    for record in found:
        order = [client for client in worst_first(record) if client < len(record.class_counts)]
        variants[repetition_label(record) if len(found) > 1 else ""] = _heat_map(
            record, order, [record.class_counts[client] for client in order],
            _unique(record.class_names), "class", "samples", "class %{x}: %{z:,} samples", xaxis_type="category",
        )  # fmt: skip
    return picture(
        "partition", "What the clients hold: samples per class", variants,
        "One row per client: the row on top is the client that is worst off at the end.",
        thin_words(max((len(record.class_counts) for record in found), default=0), MAX_ROWS),
        "Seeds divide the data differently." if len(variants) > 1 else "", choose="seed",
    )  # fmt: skip


def _heat_map(
    record: FitRecord, order: Sequence[int], rows: Sequence[Sequence[float | None]], x: Sequence[Any], axis: str,
    bar: str, hover: str, **layout: Any,
) -> Any:  # fmt: skip
    """A row per client, the first on top; hovering shows whole names, and the axis those of few clients."""
    places = both_ends(len(order), MAX_ROWS)
    names = [label_of(record, order[place]) for place in places]
    few = len(names) <= MAX_NAMED
    height, title = (max(240, 150 + 20 * len(names)), "") if few else (520, "clients, the worst at the end on top")
    ticks = {"tickvals": list(range(len(names))), "ticktext": [escaped(name, 20) for name in names]} if few else {}
    made = figure(axis, title, height, **layout).add_heatmap(
        z=np.array([rows[place] for place in places], dtype=np.float32), x=x, y=_unique(names),
        colorbar_title_text=bar, hovertemplate=f"%{{y}}<br>{hover}<extra></extra>",
    )  # fmt: skip
    return made.update_layout(
        xaxis_showgrid=False,
        yaxis={"showticklabels": few, "ticks": "", "showgrid": False, "autorange": "reversed", "type": "category"},
    ).update_yaxes(ticks)


def _unique(names: Iterable[str]) -> list[str]:
    """Names as plotly shows them that differ, because rows with one name would be one row."""
    seen: dict[str, int] = {}
    found = []
    for name in map(hover_name, names):
        seen[name] = seen.get(name, 0) + 1
        found.append(name + "\u200b" * (seen[name] - 1))
    return found
