# SPDX-License-Identifier: Apache-2.0
"""Heat maps of clients: how they fared over the rounds, and what weights they had."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_lightning.report.heat_maps import (
    cells_of,
    heat_map,
    height_of,
    row_axis,
    same_scale,
    seed_words,
    shrunk,
    stretch,
)
from fl_lightning.report.pictures import MAX_ROWS, Picture, both_ends, escaped, layout, sentences, thin_words, thinned
from fl_lightning.report.runs_of_a_method import Method, called, metrics_of, worst_first


def over_time(methods: Sequence[Method]) -> Picture | None:
    """Each client's value in the kept evaluations, as a heat map."""
    variants, captions, cells = {}, [""], cells_of(methods)
    for method in methods:
        record = method.records[0]
        kept = [values for values in record.evaluations if values.stage == "val"]
        metrics = metrics_of([record], "val")
        if len(kept) < 2 or not metrics:
            continue
        metric = next(iter(metrics))
        known = set(kept[-1].client_ids)
        order = [client for client in worst_first(record) if client in known]
        rows = [order[k] for k in both_ends(len(order), MAX_ROWS)]
        columns = [kept[k] for k in thinned(len(kept), max(2, min(150, cells // len(rows))))]
        found = [dict(zip(v.client_ids, v.values.get(metric, ()), strict=False)) for v in columns]
        z = np.array([[column.get(client) for column in found] for client in rows], dtype=np.float64)
        names = [called(record, client) for client in rows]
        drawn = heat_map(z, names, [v.round for v in columns], "values", escaped(metric),
                         f"after round %{{x}}: {escaped(metric)} %{{z:.4~g}}")  # fmt: skip
        spec = layout(
            "round", "", xaxis={"showgrid": False}, yaxis=row_axis(names, "clients, the worst at the end on top")
        )
        variants[method.label] = {"data": [drawn], "layout": spec, "height": height_of(len(rows))}
        series = Method.series(record, metric, "val")
        count = 0 if series is None else len(series.rounds)
        captions = [
            f"{metric} in validation, one row per client: the row on top is the client that is worst off at the end.",
            seed_words(methods),
            f"Drawn are {len(columns)} of {count:,} evaluations." if len(columns) < count else "",
            thin_words(len(order), MAX_ROWS, "clients"),
        ]
    if not variants:
        return None
    same_scale(list(variants.values()))
    return Picture("over-time", "Every client over the rounds", variants, sentences(*captions), "method")


def weights(methods: Sequence[Method]) -> Picture | None:
    """The weights that clients' updates had in the steps, as a heat map."""
    variants, captions, cells = {}, [""], cells_of(methods)
    for method in methods:
        record = method.records[0]
        table = record.weights
        if table is None or not table.counts or not table.counts[0]:
            continue
        order = [client for client in worst_first(record) if client < len(table.rows)]
        rows = [order[k] for k in both_ends(len(order), MAX_ROWS)]
        z, starts, width = shrunk(table, rows, cells)
        names = [called(record, client) for client in rows]
        signed = bool((z < 0).any())
        scale = "signed" if signed else "weights"
        drawn = heat_map(z, names, starts, scale, "weight", f"{stretch(width)}: weight %{{z:.4~g}}")
        spec = layout(
            "round", "", xaxis={"showgrid": False}, yaxis=row_axis(names, "clients, the worst at the end on top")
        )
        variants[method.label] = {"data": [drawn], "layout": spec, "height": height_of(len(rows))}
        same_scale([variants[method.label]], "signed" if signed else "from 0")
        captions = [
            "The weight of each client's update in the server's step, empty where the client did not take part. The "
            "row on top is the client that is worst off at the end.",
            seed_words(methods),
            f"Columns are means over {width} rounds." if width > 1 else "",
            thin_words(len(order), MAX_ROWS, "clients"),
        ]
    if not variants:
        return None
    return Picture("weights", "What weight the clients had", variants, sentences(*captions), "method")
