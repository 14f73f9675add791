# SPDX-License-Identifier: Apache-2.0
"""The picture of what the clients hold: samples per client, and per class or domain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_lightning.report.heat_maps import row_axis
from fl_lightning.report.pictures import (
    MAX_NAMED,
    MAX_ROWS,
    Picture,
    Spec,
    both_ends,
    escaped,
    hover_name,
    numbers,
    sentences,
    thin_words,
    unique,
)
from fl_lightning.report.record import FitRecord, Holdings
from fl_lightning.report.runs_of_a_method import Method, called, told, worst_first


def partition(methods: Sequence[Method]) -> Picture | None:
    """Which classes or domains the clients hold, and how many samples."""
    variants: dict[str, Spec] = {}
    seen: list[tuple[Holdings | None, tuple[int, ...]]] = []
    kind, shown, most = "", 0, 0
    for record in (record for method in methods for record in method.records):
        key = (record.holdings, record.client_sizes)
        if key in seen or not any(record.client_sizes):
            continue
        seen.append(key)
        if len(seen) > 5:
            break
        order = worst_first(record)
        rows = [order[k] for k in both_ends(len(order), MAX_ROWS)]
        shown, most = len(rows), len(order)
        kind = kind or ("" if record.holdings is None else record.holdings.kind)
        variants[told(record)] = _drawn(record, rows)
    if not variants:
        return None
    if len(variants) == 1:
        variants = {"": next(iter(variants.values()))}
    title = f"What the clients hold: samples per {kind}" if kind else "How many samples the clients hold"
    caption = sentences(
        "Columns are clients, the worst at the end on the left. The bars on top are their training samples"
        + (f", the colours below the samples of each {kind}." if kind else "."),
        thin_words(most, MAX_ROWS, "clients") if shown < most else "",
        "Seeds divide the data differently." if len(variants) > 1 else "",
    )
    return Picture("partition", title, variants, caption, "seed")


def _drawn(record: FitRecord, rows: list[int]) -> Spec:
    names = unique([hover_name(called(record, client)) for client in rows])
    few = len(rows) <= MAX_NAMED
    ticks = [escaped(record.client_names[client], 14) for client in rows]
    x = {"type": "category", "showticklabels": few, "tickmode": "array", "tickvals": list(range(len(rows))),
         "ticktext": ticks, "title": {"text": "clients, the worst at the end on the left"}, "showgrid": False,
         "automargin": True}  # fmt: skip
    bars = {
        "type": "bar", "x": names, "y": numbers([record.client_sizes[c] for c in rows], "i4"), "yaxis": "y2",
        "marker": {"color": "@c0"}, "hovertemplate": "%{x}<br>%{y:,} training samples<extra></extra>",
        "showlegend": False,
    }  # fmt: skip
    held = record.holdings
    rows = [client for client in rows if held is not None and client < len(held.counts)]
    if held is None or not rows:
        sizes = {"title": {"text": "training samples"}}
        bars["yaxis"] = "y"
        return {"data": [bars], "layout": {"xaxis": x, "yaxis": sizes, "bargap": 0.1}, "height": 280}
    z = np.array([held.counts[client] for client in rows], dtype=np.float64).T
    heat = {
        "type": "heatmap", "z": numbers(z), "x": names[: len(rows)], "colorscale": "@blue", "zmin": 0,
        "zmax": max(1.0, float(z.max())),
        "y": unique([hover_name(name) for name in held.columns]),
        "hovertemplate": f"%{{x}}<br>{escaped(held.kind)} %{{y}}: %{{z:,}} samples<extra></extra>",
        "colorbar": {"title": {"text": "samples", "side": "right"}, "thickness": 12, "outlinewidth": 0, "len": 0.72,
                     "y": 0, "yanchor": "bottom"},
    }  # fmt: skip
    y = {**row_axis(held.columns, held.kind), "domain": [0, 0.72]}
    y["title"] = {"text": escaped(held.kind)}
    above = {"domain": [0.78, 1], "title": {"text": "all"}, "nticks": 4}
    height = 300 + (18 * len(held.columns) if len(held.columns) <= MAX_NAMED else 400)
    return {"data": [heat, bars], "layout": {"xaxis": x, "yaxis": y, "yaxis2": above, "bargap": 0.1}, "height": height}
