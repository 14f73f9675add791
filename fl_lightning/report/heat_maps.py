# SPDX-License-Identifier: Apache-2.0
"""Heat maps: how clients fared over the rounds, their weights, conflicts in layers, and what data clients hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from fl_lightning.report.pictures import (
    MAX_NAMED,
    Picture,
    Spec,
    both_ends,
    escaped,
    first_words,
    hover_name,
    means_words,
    numbers,
    picture,
    spec,
    thin_words,
    thinned,
)
from fl_lightning.report.record import FitRecord, RoundTable
from fl_lightning.report.runs_of_a_method import Method, called, series_of, shown_metrics, told, worst_first

MAX_ROWS = 400
_Cells = np.ndarray[Any, np.dtype[np.float64]]
_ORDER = "clients, the worst at the end on top"


def over_time(methods: Sequence[Method]) -> Picture | None:
    """Each client's value in the kept evaluations."""
    variants, captions = {}, [""]
    for method in methods:
        record = method.first
        kept = [values for values in record.evaluations if values.stage == "val"]
        metric = next((name for name, *_ in shown_metrics([method], "val")), None)
        if len(kept) < 2 or metric is None:
            continue
        known = set(kept[-1].client_ids)
        order, rows = _drawn([client for client in worst_first(record) if client in known])
        columns = [kept[k] for k in thinned(len(kept), max(2, min(150, _cells(methods) // len(rows))))]
        found = [dict(zip(v.client_ids, v.values.get(metric, ()), strict=False)) for v in columns]
        z = np.array([[column.get(client) for column in found] for client in rows], dtype=np.float64)
        names, hover = [called(record, client) for client in rows], f"after round %{{x}}: {escaped(metric)} %{{z:.4~g}}"
        variants[method.label] = _map(z, names, [v.round for v in columns], "values", escaped(metric), hover, _ORDER)
        series = series_of(record, metric, "val")
        count = 0 if series is None else len(series.rounds)
        captions = [
            f"{metric} in validation, one row per client: the row on top is the client that is worst off at the end.",
            first_words(methods),
            f"Drawn are {len(columns)} of {count:,} evaluations." if len(columns) < count else "",
            thin_words(len(order), MAX_ROWS),
        ]
    _same_scale(list(variants.values()))
    return picture("over-time", "Every client over the rounds", variants, *captions, choose="method")


def weights(methods: Sequence[Method]) -> Picture | None:
    """The weights that clients' updates had in the steps."""
    variants, captions = {}, [""]
    for method in methods:
        record = method.first
        table = record.weights
        if table is None or not table.counts or not table.counts[0]:
            continue
        order, rows = _drawn([client for client in worst_first(record) if client < len(table.rows)])
        z, starts, width = _shrunk(table, rows, _cells(methods))
        signed = bool((z < 0).any())
        names, hover = [called(record, client) for client in rows], f"{_stretch(width)}: weight %{{z:.4~g}}"
        made = _map(z, names, starts, "signed" if signed else "weights", "weight", hover, _ORDER)
        _same_scale([made], "signed" if signed else "from 0")
        variants[method.label] = made
        captions = [
            "The weight of each client's update in the server's step, empty where the client did not take part. The "
            "row on top is the client that is worst off at the end.",
            first_words(methods),
            means_words(width, "Columns"),
            thin_words(len(order), MAX_ROWS),
        ]
    return picture("weights", "What weight the clients had", variants, *captions, choose="method")


def layer_conflicts(methods: Sequence[Method]) -> Picture | None:
    """Clients in conflict with the step, layer by layer."""
    variants, longest = {}, 1
    for method in methods:
        table = method.first.layer_conflicts
        if table is None or not table.counts or not table.counts[0]:
            continue
        z, starts, width = _shrunk(table, range(len(table.rows)), _cells(methods))
        hover = f"{_stretch(width)}: %{{z:.3~g}} % of the clients"
        made = _map(100 * z, table.rows, starts, "red", "%", hover, "layers, the first on top")
        variants[method.label], longest = {**made, "height": max(240, made["height"])}, max(longest, width)
    _same_scale(list(variants.values()), "from 0")
    return picture(
        "layer-conflicts", "Conflicts in each layer", variants,
        "Share of a round's clients in conflict with the step in each layer.",
        "All methods have the same colours." if len(variants) > 1 else "",
        first_words(methods), means_words(longest, "Columns"), choose="method",
    )  # fmt: skip


def partition(methods: Sequence[Method]) -> Picture | None:
    """Which classes or domains the clients hold, and how many samples."""
    divisions: dict[Any, FitRecord] = {}
    for record in (record for method in methods for record in method.records if any(record.client_sizes)):
        divisions.setdefault((record.client_sizes, record.holdings), record)
    found = list(divisions.values())[:5]
    variants = {told(record) if len(found) > 1 else "": _held(record) for record in found}
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


def _held(record: FitRecord) -> Spec:
    _, rows = _drawn(worst_first(record))
    names = _unique([hover_name(called(record, client)) for client in rows])
    ticks = [escaped(record.client_names[client], 14) for client in rows]
    x = {"type": "category", "showticklabels": len(rows) <= MAX_NAMED, "tickmode": "array",
         "tickvals": list(range(len(rows))), "ticktext": ticks, "showgrid": False}  # fmt: skip
    bars = {
        "type": "bar", "x": names, "y": numbers([record.client_sizes[c] for c in rows], "i4"), "showlegend": False,
        "marker": {"color": "@c0"}, "hovertemplate": "%{x}<br>%{y:,} training samples<extra></extra>",
    }  # fmt: skip
    title, held = "clients, the worst at the end on the left", record.holdings
    rows = [client for client in rows if held is not None and client < len(held.counts)]
    if held is None or not rows:
        return spec([bars], title, "training samples", 280, xaxis=x, bargap=0.1)
    z = np.array([held.counts[client] for client in rows], dtype=np.float64).T
    heat = {
        "type": "heatmap", "z": numbers(z), "x": names[: len(rows)], "colorscale": "@blue", "zmin": 0,
        "zmax": max(1.0, float(z.max())), "y": _unique([hover_name(name) for name in held.columns]),
        "hovertemplate": f"%{{x}}<br>{escaped(held.kind)} %{{y}}: %{{z:,}} samples<extra></extra>",
        "colorbar": {"title": {"text": "samples"}, "len": 0.72, "y": 0, "yanchor": "bottom"},
    }  # fmt: skip
    y = {**_row_axis(held.columns, ""), "domain": [0, 0.72], "title": {"text": escaped(held.kind)}}
    above = {"domain": [0.78, 1], "title": {"text": "all"}, "nticks": 4}
    height = 300 + (18 * len(held.columns) if len(held.columns) <= MAX_NAMED else 400)
    return spec([heat, {**bars, "yaxis": "y2"}], title, "", height, xaxis=x, yaxis=y, yaxis2=above, bargap=0.1)


def _drawn(order: list[int]) -> tuple[list[int], list[int]]:
    return order, [order[place] for place in both_ends(len(order), MAX_ROWS)]


def _map(z: _Cells, rows: Sequence[str], x: Sequence[int], scale: str, bar: str, hover: str, axis: str) -> Spec:
    """A heat map of rows over rounds; hovering shows their names. :func:`_same_scale` comes after it."""
    drawn = {
        "type": "heatmap", "z": numbers(z), "x": numbers(x, "i4"), "y": _unique([hover_name(name) for name in rows]),
        "colorscale": f"@{scale}", "hoverongaps": False, "hovertemplate": f"%{{y}}<br>{hover}<extra></extra>",
        "zmin": float(np.nanmin(z)) if np.isfinite(z).any() else 0.0,
        "zmax": float(np.nanmax(z)) if np.isfinite(z).any() else 1.0, "colorbar": {"title": {"text": bar}},
    }  # fmt: skip
    height = 150 + 20 * len(rows) if len(rows) <= MAX_NAMED else 520
    return spec([drawn], "round", "", height, xaxis={"showgrid": False}, yaxis=_row_axis(rows, axis))


def _row_axis(rows: Sequence[str], title: str) -> Spec:
    """The axis of a heat map's rows, the first row on top; with few of them they have their names."""
    few = len(rows) <= MAX_NAMED
    names = [escaped(name, 20) for name in rows]
    ticks = {"tickmode": "array", "tickvals": list(range(len(rows))), "ticktext": names} if few else {}
    shown = {"showticklabels": few, "ticks": "", "showgrid": False, "autorange": "reversed", "type": "category"}
    return {"title": {"text": "" if few else title}, **shown, **ticks}


def _shrunk(table: RoundTable, rows: Sequence[int], cells: int) -> tuple[_Cells, list[int], int]:
    """Means of some rows of a table, their first rounds, and rounds per column: longer stretches if there are many."""
    sums = np.array([table.totals, table.counts], dtype=np.float64)[:, list(rows)]
    most = max(2, min(200, cells // max(1, len(rows))))
    join = -(-sums.shape[2] // most)
    totals, counts = np.pad(sums, ((0, 0), (0, 0), (0, -sums.shape[2] % join))).reshape(2, len(rows), -1, join).sum(3)
    means = np.divide(totals, counts, out=np.full_like(totals, np.nan), where=counts > 0)
    width = table.width * join
    return means, [k * width + 1 for k in range(means.shape[1])], width


def _stretch(width: int) -> str:
    return "round %{x}" if width == 1 else f"{width} rounds from %{{x}} on"


def _cells(methods: Sequence[Method]) -> int:
    """Cells of one heat map: with many methods, the page stays small."""
    return min(60_000, 240_000 // len(methods))


def _same_scale(specs: Sequence[Spec], kind: Literal["from 0", "signed", "as found"] = "as found") -> None:
    """Gives heat maps one scale of colours, so that they can be compared."""
    traces = [made["data"][0] for made in specs]
    low, high = min((t["zmin"] for t in traces), default=0.0), max((t["zmax"] for t in traces), default=0.0)
    if kind == "signed":
        high = max(-low, high)
        low = -high
    low = 0.0 if kind == "from 0" else low
    for trace in traces:
        trace |= {"zmin": low, "zmax": high if high > low else low + 1}


def _unique(names: Sequence[str]) -> list[str]:
    """Names that differ, because rows with one name would be one row."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name + "\u200b" * (seen[name] - 1))
    return found
