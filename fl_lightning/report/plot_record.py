# SPDX-License-Identifier: Apache-2.0
"""Draws fairness and conflicts of one fit over its rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.arguments import checked
from fl_lightning.report.figures import new_figure
from fl_lightning.report.pictures import binned
from fl_lightning.report.record import FitRecord
from fl_lightning.report.runs_of_a_method import metrics_of, series_of
from fl_lightning.report.style import LIGHT

_COLUMNS = 200


@checked()
def plot_fairness(record: FitRecord, path: str | Path | None = None, metric: str | None = None) -> Any:
    """Draws mean and worst 10 % of the clients in validation over the rounds, and the fairness angle below.

    Args:
        record: of the fit: ``FitRecorder().record``.
        path: file to write; its suffix chooses the format.
        metric: which metric; by default the first where larger is better, or else the first.

    Returns:
        The matplotlib ``Figure``.

    Raises:
        ValueError: the fit has no validation, or none with this metric.
        ImportError: matplotlib, which the extra ``plots`` brings, is missing.
    """
    known = metrics_of([record], "val")
    name = next(iter(known), None) if metric is None else metric
    series = None if name is None else series_of(record, name, "val")
    if series is None:
        raise ValueError(f"metric must be one of {list(known)}, found {name!r}")
    angles = series.mode == "max"
    with new_figure("plot_fairness", 6.4, 5.2 if angles else 3.4, path) as figure:
        upper, *lower = figure.subplots(2 if angles else 1, 1, sharex=True, squeeze=False)[:, 0]
        drawn = {key: np.array(series.summaries[key], dtype=float) for key in ("mean", "worst_10", *["angle"] * angles)}
        upper.set_title("Mean and worst clients over the rounds")
        upper.plot(series.rounds, drawn["mean"], label="mean over the clients")
        upper.plot(series.rounds, drawn["worst_10"], linestyle="--", color="C0", label="mean of the worst 10 %")
        upper.set_ylabel(series.metric)
        upper.legend()
        for axes in lower:
            axes.plot(series.rounds, drawn["angle"])
            axes.set_ylabel("fairness angle (rad)\n0: all clients alike")
            axes.set_ylim(bottom=0)
        figure.axes[-1].set_xlabel("round")
    return figure


@checked()
def plot_conflicts(record: FitRecord, path: str | Path | None = None) -> Any:
    """Draws the share of each round's clients that are in conflict: on the whole model, and in each layer.

    In long fits, means over several rounds are drawn.

    Args:
        record: of the fit: ``FitRecorder().record``.
        path: file to write; its suffix chooses the format.

    Returns:
        The matplotlib ``Figure``.

    Raises:
        ValueError: no round has finished.
        ImportError: matplotlib, which the extra ``plots`` brings, is missing.
    """
    rounds, table = record.rounds, record.layer_conflicts
    if not len(rounds):
        raise ValueError("record of plot_conflicts must have one finished round or more, found none")
    pairs = zip(rounds.conflicts, rounds.clients, strict=True)
    whole = [count / clients if clients else None for count, clients in pairs]
    rows, lines = ["whole model"], [binned(whole, _COLUMNS)[0]]
    if table is not None:
        rows, lines = [*rows, *table.rows], [*lines, *(binned(line, _COLUMNS)[0] for line in table.means)]
    with new_figure("plot_conflicts", 6.4, min(9.0, 2.0 + 0.3 * len(rows)), path) as figure:
        from matplotlib.colors import LinearSegmentedColormap

        axes = figure.subplots()
        colors = LinearSegmentedColormap.from_list("conflicts", LIGHT.red)
        picture = None
        for row, line in enumerate(lines):
            picture = axes.imshow(
                100 * np.array([line], dtype=float), cmap=colors, aspect="auto", vmin=0, vmax=100,
                extent=(rounds.round[0] + 0.5, rounds.round[-1] + 1.5, row + 0.5, row - 0.5), interpolation="nearest",
            )  # fmt: skip
        step = -(-len(rows) // 30)
        axes.set_yticks(range(0, len(rows), step), rows[::step])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.axhline(0.5, color=LIGHT.paper, linewidth=3)
        axes.grid(visible=False)
        axes.set_xlabel("round")
        axes.set_title("Clients that the step works against")
        figure.colorbar(picture, ax=axes, label="% of the round's clients")
    return figure
