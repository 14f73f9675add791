# SPDX-License-Identifier: Apache-2.0
"""Heat maps of rows over rounds, and what pictures say about what they leave out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from fl_lightning.report.number_formats import plural
from fl_lightning.report.pictures import MAX_CELLS, MAX_NAMED, Spec, escaped, hover_name, numbers, unique
from fl_lightning.report.record import RoundTable
from fl_lightning.report.runs_of_a_method import Method


def heat_map(z: np.ndarray[Any, Any], rows: Sequence[str], x: Sequence[int], scale: str, bar: str, hover: str) -> Spec:
    """A heat map whose rows have names that hovering shows; :func:`same_scale` comes after it."""
    return {
        "type": "heatmap",
        "z": numbers(z),
        "x": numbers(x, "i4"),
        "y": unique([hover_name(name) for name in rows]),
        "colorscale": f"@{scale}",
        "low": float(np.nanmin(z)) if np.isfinite(z).any() else 0.0,
        "high": float(np.nanmax(z)) if np.isfinite(z).any() else 1.0,
        "hoverongaps": False,
        "hovertemplate": f"%{{y}}<br>{hover}<extra></extra>",
        "colorbar": {"title": {"text": bar, "side": "right"}, "thickness": 12, "outlinewidth": 0},
    }


def row_axis(rows: Sequence[str], title: str) -> Spec:
    """The axis of a heat map's rows, the first row on top; with few of them they have their names."""
    names = [escaped(name, 20) for name in rows]
    few = len(rows) <= MAX_NAMED
    ticks = {"tickmode": "array", "tickvals": list(range(len(rows))), "ticktext": names} if few else {}
    shown = {"showticklabels": few, "ticks": "", "showgrid": False, "autorange": "reversed", "automargin": True}
    return {"title": {"text": "" if few else title}, "type": "category", **shown, **ticks}


def shrunk(
    table: RoundTable, rows: Sequence[int], cells: int
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.float64]], list[int], int]:
    """Means of some rows of a table, their first rounds, and rounds per column: longer stretches if there are many."""
    totals, counts = np.array(table.totals)[list(rows)], np.array(table.counts, dtype=np.float64)[list(rows)]
    most = max(2, min(200, cells // max(1, len(rows))))
    join = -(-totals.shape[1] // most)
    pad = -totals.shape[1] % join
    joined = [np.pad(sums, ((0, 0), (0, pad))).reshape(len(rows), -1, join).sum(axis=2) for sums in (totals, counts)]
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(joined[1] > 0, joined[0] / joined[1], np.nan)
    width = table.width * join
    return means, [k * width + 1 for k in range(means.shape[1])], width


def stretch(width: int) -> str:
    """A column, in what hovering shows."""
    return "round %{x}" if width == 1 else f"{width} rounds from %{{x}} on"


def cells_of(methods: Sequence[Method]) -> int:
    """Cells of one heat map: with many methods, the page stays small."""
    return min(MAX_CELLS, 240_000 // len(methods))


def height_of(rows: int) -> int:
    """Pixels of a heat map with so many rows."""
    return 150 + 20 * rows if rows <= MAX_NAMED else 520


def seed_words(methods: Sequence[Method]) -> str:
    """That one seed of several is drawn."""
    if all(len(method.records) == 1 for method in methods):
        return ""
    return f"Of {plural(max(len(method.records) for method in methods), 'seed')}, the first is drawn."


def same_scale(specs: Sequence[Spec], kind: Literal["from 0", "signed", "as found"] = "as found") -> None:
    """Gives heat maps one scale of colours, so that they can be compared."""
    traces = [spec["data"][0] for spec in specs]
    found = [(trace.pop("low"), trace.pop("high")) for trace in traces]
    low, high = min(low for low, _ in found), max(high for _, high in found)
    if kind == "signed":
        high = max(-low, high)
        low = -high
    low = 0.0 if kind == "from 0" else low
    for trace in traces:
        trace |= {"zmin": low, "zmax": high if high > low else low + 1}
