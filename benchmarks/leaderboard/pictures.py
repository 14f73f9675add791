# SPDX-License-Identifier: Apache-2.0
"""A suite at a glance: every method's differences to FedAvg, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import new_figure
from benchmarks.leaderboard.bootstrap import Interval
from benchmarks.leaderboard.standing import COLUMNS, Row, columns_of
from benchmarks.leaderboard.suites import SEEDS
from fl_lightning.report.pictures import LIGHT

BETTER, WORSE, NOISE = LIGHT.colors[0], LIGHT.colors[1], LIGHT.muted
_PANEL, _LINE, _EDGE, _NAMES = 2.7, 0.21, 1.1, 1.9  # inches


def draw(rows: Sequence[Row], reference: str, path: Path) -> None:
    """Draws a line per method, and a panel per kind of difference: accuracies, and the AUROC of the worst or of all.

    The best for the worst tenth is at the top; for the mean, where there is no worst tenth.

    Args:
        rows: of the suite; the reference has no differences.
        reference: name of the method that 0 stands for.
        path: of the picture; nothing is drawn if no method can be compared with the reference.
    """
    rows = [row for row in rows if row.differences]
    columns = [column for column in columns_of(rows) if column[0] != "parity"]  # of which less is better
    if not columns:
        return
    if len(columns) == len(COLUMNS) - 1:
        columns.remove(("auroc", "mean"))
    chief = [column for column in columns if column[0] == "accuracy"][-1]
    rows.sort(key=lambda row: row.differences[chief].difference)
    size = _NAMES + _PANEL * len(columns), _EDGE + _LINE * len(rows)
    with new_figure(*size, path) as figure:
        panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        for panel, column in zip(panels, columns, strict=True):
            _panel(panel, [row.differences.get(column) for row in rows], f"{COLUMNS[column]}, minus {reference}")
        panels[0].set_yticks(range(len(rows)), map(_name, rows))
        panels[0].set_ylim(-0.7, len(rows) - 0.3)
        figure.supxlabel(
            f"Blue: better than {reference} beyond the noise.{' ' if len(columns) > 1 else chr(10)}Orange: worse. "
            "Grey: noise. Lines: 95 % intervals.",
            fontsize="small",
            color=LIGHT.muted,
        )


def _name(row: Row) -> str:
    seeds = row.accuracy.repetitions
    return row.accuracy.method + (f" ({seeds} seed{'s' * (seeds > 1)})" if seeds < SEEDS else "")


def _panel(panel: Any, found: Sequence[Interval | None], name: str) -> None:
    panel.set_title(name, fontsize="small")
    panel.axvline(0, color=LIGHT.ink, linewidth=1)
    for place, each in enumerate(found):
        if each is not None:
            colour = NOISE if each.is_noise else BETTER if each.difference > 0 else WORSE
            panel.plot([each.low, each.high], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")
            panel.plot([each.difference], [place], "o", color=colour, markersize=4.5)
    panel.locator_params(axis="x", nbins=5)
    panel.tick_params(axis="both", labelsize="small", length=0)
