# SPDX-License-Identifier: Apache-2.0
"""Heat maps: how clients fared over the rounds, their weights, conflicts in layers, and what data clients hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from plotly import graph_objects as go

from fl_lightning.report.pictures import (
    MAX_NAMED,
    Picture,
    both_ends,
    color_of,
    escaped,
    figure,
    first_words,
    hover_name,
    picture,
    thin_words,
    thinned,
)
from fl_lightning.report.record import FitRecord, RoundTable
from fl_lightning.report.runs_of_a_method import (
    Method,
    label_of,
    repetition_label,
    series_of,
    shown_metrics,
    worst_first,
)

MAX_ROWS = 400
_MOST_COLUMNS = 200  # of evaluations; a record's tables have no more than 50,000 cells
_ORDER = "clients, the worst at the end on top"


class _Map(NamedTuple):
    """What a heat map shows."""

    z: np.ndarray[Any, np.dtype[np.float64]]
    rows: list[str]
    x: list[int]  # rounds
    width: int = 1  # rounds per column


def over_time(methods: Sequence[Method]) -> Picture | None:
    """Each client's value in the validations that the record has."""
    maps, named, captions = dict[str, _Map](), dict[str, str](), [""]
    for method in methods:
        record = method.first
        validations = [values for values in record.evaluations if values.stage == "val"]
        metric = next((name for name, *_ in shown_metrics([method], "val")), None)
        if len(validations) < 2 or metric is None:
            continue
        known = set(validations[-1].client_ids)
        order = [client for client in worst_first(record) if client in known]
        rows = _shown(order)
        columns = [validations[k] for k in thinned(len(validations), _MOST_COLUMNS)]
        found = [dict(zip(v.client_ids, v.values.get(metric, ()), strict=False)) for v in columns]
        z = np.array([[column.get(client) for column in found] for client in rows], dtype=np.float64)
        maps[method.label] = _Map(z, [label_of(record, client) for client in rows], [v.round for v in columns])
        named[method.label] = escaped(metric)
        series = series_of(record, metric, "val")
        count = 0 if series is None else len(series.rounds)
        captions = [
            f"{metric} in validation, one row per client: the row on top is the client that is worst off at the end.",
            first_words(methods),
            f"Drawn are {len(columns)} of {count:,} evaluations." if len(columns) < count else "",
            thin_words(len(order), MAX_ROWS),
        ]
    ends = _ends_of(maps.values(), from_0=False)
    variants = {label: _drawn(map_, ends, named[label], "", _ORDER, "Cividis") for label, map_ in maps.items()}
    return picture("over-time", "Every client over the rounds", variants, *captions, choose="method")


def weights(methods: Sequence[Method]) -> Picture | None:
    """The weights that clients' updates had in the steps."""
    tables = [(method.label, method.first, method.first.weights) for method in methods]
    found = {
        label: _means(
            table, [client for client in worst_first(record) if client < len(table.rows)], partial(label_of, record)
        )
        for label, record, table in tables
        if table is not None and any(table.counts)
    }
    most = max((len(table.rows) for _, _, table in tables if table is not None), default=0)
    return picture(
        "weights", "What weight the clients had",
        {label: _drawn(one, _ends_of([one]), "weight", "", _ORDER) for label, one in found.items()},
        "The weight of each client's update in the server's step, empty where the client did not take part. The row on "
        "top is the client that is worst off at the end.",
        first_words(methods), _widest(found), thin_words(most, MAX_ROWS), choose="method",
    )  # fmt: skip


def layer_conflicts(methods: Sequence[Method]) -> Picture | None:
    """Clients in conflict with the step, layer by layer."""
    tables = [(method.label, method.first.layer_conflicts) for method in methods]
    found = {
        label: _means(table, range(len(table.rows)), table.rows.__getitem__, 100)
        for label, table in tables
        if table is not None and any(table.counts)
    }
    ends, axis = _ends_of(found.values()), "layers, the first on top"
    return picture(
        "layer-conflicts", "Conflicts in each layer",
        {label: _drawn(one, ends, "%", " % of the clients", axis) for label, one in found.items()},
        "Share of a round's clients in conflict with the step in each layer.",
        "All methods have the same colours." if len(found) > 1 else "",
        first_words(methods), _widest(found), choose="method",
    )  # fmt: skip


def partition(methods: Sequence[Method]) -> Picture | None:
    """Which classes or domains the clients hold, and how many samples."""
    divisions: dict[Any, FitRecord] = {}
    for record in (record for method in methods for record in method.records if any(record.client_sizes)):
        divisions.setdefault((record.client_sizes, record.holdings), record)
    found = list(divisions.values())[:5]
    variants = {repetition_label(record) if len(found) > 1 else "": _held(record) for record in found}
    kind = next((record.holdings.kind for record in found if record.holdings is not None), "")
    return picture(
        "partition",
        f"What the clients hold: samples per {kind}" if kind else "How many samples the clients hold",
        variants,
        "Columns are clients, the worst at the end on the left. The bars on top are their training samples"
        + (f", the colours below the samples of each {kind}." if kind else "."),
        thin_words(max((len(record.client_names) for record in found), default=0), MAX_ROWS),
        "Seeds divide the data differently." if len(variants) > 1 else "",
        choose="seed",
    )


def _held(record: FitRecord) -> Any:
    clients = _shown(worst_first(record))
    names = _unique(label_of(record, client) for client in clients)
    x = {"showticklabels": len(clients) <= MAX_NAMED, "tickvals": list(range(len(clients))), "type": "category",
         "ticktext": [escaped(record.client_names[client], 14) for client in clients], "showgrid": False}  # fmt: skip
    sizes = [record.client_sizes[client] for client in clients]
    bars = go.Bar(x=names, y=sizes, marker_color=color_of(0), showlegend=False, name="training samples")
    title, held = "clients, the worst at the end on the left", record.holdings
    holding = [client for client in clients if held is not None and client < len(held.counts)]
    if held is None or not holding:
        return figure([bars], title, "training samples", 280, xaxis=x, bargap=0.1)
    counts = np.array([held.counts[client] for client in holding], dtype=np.float64).T
    heat = go.Heatmap(
        z=counts.astype(np.float32), x=names[: len(holding)], y=_unique(held.columns), autocolorscale=True,
        zmin=0, zmax=counts.max() or 1, colorbar={"title_text": "samples", "len": 0.72, "y": 0, "yanchor": "bottom"},
        hovertemplate=f"%{{x}}<br>{escaped(held.kind)} %{{y}}: %{{z:,}} samples<extra></extra>",
    )  # fmt: skip
    height = 300 + (18 * len(held.columns) if len(held.columns) <= MAX_NAMED else 400)
    made = figure(
        [heat, bars.update(yaxis="y2")], title, "", height, xaxis=x, yaxis=_row_axis(held.columns), bargap=0.1
    )
    above = {"domain": [0.78, 1], "title_text": "all", "nticks": 4}
    return made.update_layout(yaxis_domain=[0, 0.72], yaxis_title_text=escaped(held.kind), yaxis2=above)


def _means(table: RoundTable, order: Sequence[int], name_of: Callable[[int], str], factor: float = 1.0) -> _Map:
    """The means of a record's table, for rows in this order."""
    rows, means = _shown(order), np.array(table.means, dtype=np.float64)
    starts = [k * table.width + 1 for k in range(means.shape[1])]
    return _Map(factor * means[rows], list(map(name_of, rows)), starts, table.width)


def _drawn(shown: _Map, ends: tuple[float, float], bar: str, unit: str, axis: str, colors: str | None = None) -> Any:
    """A heat map over the rounds; hovering shows the names of its rows."""
    when = "round %{x}" if shown.width == 1 else f"{shown.width} rounds from %{{x}} on"
    heat = go.Heatmap(
        z=shown.z.astype(np.float32), x=shown.x, y=_unique(shown.rows), zmin=ends[0], zmax=ends[1],
        colorscale=colors, autocolorscale=colors is None, colorbar_title_text=bar,
        hovertemplate=f"%{{y}}<br>{when}: %{{z:.4~g}}{unit}<extra></extra>",
    )  # fmt: skip
    height = max(240, 150 + 20 * len(shown.rows)) if len(shown.rows) <= MAX_NAMED else 520
    title = "" if len(shown.rows) <= MAX_NAMED else axis
    return figure([heat], "round", title, height, xaxis={"showgrid": False}, yaxis=_row_axis(shown.rows))


def _row_axis(rows: Sequence[str]) -> dict[str, Any]:
    """The axis of a heat map's rows, the first row on top; with few of them they have their names."""
    few = len(rows) <= MAX_NAMED
    ticks = {"tickvals": list(range(len(rows))), "ticktext": [escaped(name, 20) for name in rows]} if few else {}
    return {"showticklabels": few, "ticks": "", "showgrid": False, "autorange": "reversed", "type": "category", **ticks}


def _shown(order: Sequence[int]) -> list[int]:
    return [order[place] for place in both_ends(len(order), MAX_ROWS)]


def _ends_of(maps: Iterable[_Map], from_0: bool = True) -> tuple[float, float]:
    """The ends of a scale of colours: it begins with 0, or has 0 in the middle, or has what was found."""
    found = np.concatenate([np.zeros(int(from_0)), *(map_.z.ravel() for map_ in maps)])
    found = found[np.isfinite(found)]
    low, high = (float(found.min()), float(found.max())) if found.size else (0.0, 1.0)
    if from_0 and low < 0:
        high = max(-low, high)
        low = -high
    return low, high if high > low else low + 1


def _widest(maps: dict[str, _Map]) -> str:
    width = max((map_.width for map_ in maps.values()), default=1)
    return f"Columns are means over {width} rounds." if width > 1 else ""


def _unique(names: Iterable[str]) -> list[str]:
    """Names as plotly shows them that differ, because rows with one name would be one row."""
    seen: dict[str, int] = {}
    found = []
    for name in map(hover_name, names):
        seen[name] = seen.get(name, 0) + 1
        found.append(name + "\u200b" * (seen[name] - 1))
    return found
