# SPDX-License-Identifier: Apache-2.0
"""Figures of matplotlib in the style of the report: who holds what, fairness and conflicts over the rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from fl_lightning.arguments import ANY, check, checked, shown
from fl_lightning.core.errors import how_to_install
from fl_lightning.report.pictures import LIGHT, binned
from fl_lightning.report.record import FitRecord
from fl_lightning.report.runs_of_a_method import by_method, series_of, shown_metrics

_COLUMNS = 200


@contextmanager
def new_figure(caller: str, width: float, height: float, path: str | Path | None) -> Iterator[Any]:
    """A figure to draw into, which is saved at the end if there is a path.

    It is not pyplot's: it works without a display, and leaves nothing open behind it.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{caller} needs matplotlib: {how_to_install('plots')}") from error
    with rc_context(_style()):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        if path is not None:
            figure.savefig(path)


def _style() -> dict[Any, Any]:
    """Settings for ``matplotlib.rc_context`` that give figures this look."""
    from cycler import cycler

    return {
        "axes.axisbelow": True, "axes.edgecolor": LIGHT.muted, "axes.grid": True, "axes.labelcolor": LIGHT.ink,
        "axes.prop_cycle": cycler(color=LIGHT.colors), "axes.spines.right": False, "axes.spines.top": False,
        "axes.titlecolor": LIGHT.ink, "axes.titlelocation": "left", "axes.titlesize": "medium",
        "figure.facecolor": LIGHT.paper, "figure.dpi": 120, "grid.color": LIGHT.grid, "grid.linewidth": 0.8,
        "legend.frameon": False, "lines.linewidth": 1.8, "savefig.dpi": 150, "text.color": LIGHT.ink,
        "xtick.color": LIGHT.muted, "xtick.labelcolor": LIGHT.ink, "ytick.color": LIGHT.muted,
        "ytick.labelcolor": LIGHT.ink,
    }  # fmt: skip


@checked(target=ANY)
def plot_partition(
    label_counts: Tensor,
    target: str | Path | Any | None = None,
    *,
    kind: Literal["bubbles", "bars"] = "bubbles",
    class_names: Sequence[str] | None = None,
    title: str | None = None,
) -> Any:
    """Draws a partition: clients across, classes up (bubbles) or stacked (bars).

    Args:
        label_counts: ``[N, C]`` samples of each client in each class, as ``FederatedDataModule.label_counts()`` gives.
        target: a file to write, a matplotlib ``Axes`` to draw into, or nothing for a new figure.
        kind: ``"bubbles"`` with areas proportional to counts, or ``"bars"`` with one stack per client.
        class_names: one name per class; default their column numbers.
        title: heading; default a sentence of numbers.

    Returns:
        The matplotlib ``Figure``.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: ``label_counts`` is not a non-empty matrix of non-negative numbers, the names do not fit, or
            ``kind`` is unknown.
    """
    if label_counts.dim() != 2 or label_counts.numel() == 0 or bool((label_counts < 0).any()):
        raise ValueError(f"label_counts must be a non-empty [N, C] matrix of counts, found {list(label_counts.shape)}")
    counts = label_counts.cpu().numpy()
    num_clients, num_classes = counts.shape
    names = [str(number) for number in range(num_classes)] if class_names is None else list(class_names)
    if len(names) != num_classes:
        raise ValueError(f"class_names must hold {num_classes} names, found {len(names)}")
    if isinstance(target, str):
        check("target of plot_partition", target, str)
    if target is not None and not isinstance(target, (str, Path)):
        if not hasattr(target, "figure"):
            raise TypeError(f"target of plot_partition must be None, a path or matplotlib Axes, found {shown(target)}")
        _draw(target, counts, names, kind, title)
        return target.figure
    width = min(max(5.0, 1.8 + 0.16 * num_clients), 16.0)
    height = min(max(2.8, 1.4 + 0.24 * num_classes), 9.0) if kind == "bubbles" else 4.0
    with new_figure("plot_partition", width, height, target) as figure:
        _draw(figure.subplots(), counts, names, kind, title)
    return figure


def _draw(axes: Any, counts: np.ndarray[Any, Any], names: list[str], kind: str, title: str | None) -> None:
    from matplotlib.ticker import MaxNLocator

    num_clients, sizes = len(counts), counts.sum(axis=1)
    (_bubbles if kind == "bubbles" else _bars)(axes, counts, names)
    largest = f"\nlargest bubble: {counts.max()} samples" if kind == "bubbles" else ""
    sentence = f"{num_clients} clients, {sizes.min()} to {sizes.max()} samples each{largest}"
    axes.set_title(sentence if title is None else title, loc="left", fontsize="medium")
    axes.set_xlabel("client")
    axes.set_xlim(-0.7, num_clients - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def _bubbles(axes: Any, counts: np.ndarray[Any, Any], names: list[str]) -> None:
    client, column = np.nonzero(counts)
    figure_width, figure_height = axes.figure.get_size_inches()
    # The largest bubble nearly has the area of its cell. `s` is in square points, 72 of them to an inch and side.
    cell = (0.8 * figure_width / counts.shape[0]) * (0.7 * figure_height / counts.shape[1]) * 72**2
    areas = counts[client, column] / counts.max() * min(0.75 * cell, 700.0)
    axes.scatter(client, column, s=np.maximum(areas, 0.5), color=LIGHT.colors[0], alpha=0.85, linewidths=0)
    step = -(-counts.shape[1] // 30)
    axes.set_yticks(range(0, counts.shape[1], step), names[::step])
    axes.set_ylim(-0.7, counts.shape[1] - 0.3)
    axes.set_ylabel("class")


def _bars(axes: Any, counts: np.ndarray[Any, Any], names: list[str]) -> None:
    from matplotlib import colormaps

    few = counts.shape[1] <= len(LIGHT.colors)
    shades = [
        LIGHT.colors[k] if few else colormaps["viridis"](k / (counts.shape[1] - 1)) for k in range(counts.shape[1])
    ]
    base, edges = np.zeros(len(counts)), np.arange(len(counts) + 1) - 0.5
    for column, name in enumerate(names):
        # One patch per class, not one per class and client: thousands of clients stay quick.
        top = base + counts[:, column]
        axes.stairs(top, edges, baseline=base, fill=True, color=shades[column], label=name)
        base = top
    axes.set_ylabel("samples")
    if counts.shape[1] <= 20:
        axes.legend(title="class", fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


@checked()
def plot_fairness(record: FitRecord, path: str | Path | None = None, metric: str | None = None) -> Any:
    """Draws mean and worst 10 % of the clients in validation over the rounds, and the fairness angle below.

    Args:
        record: of the fit: ``FitRecorder().record``.
        path: file to write; its suffix chooses the format.
        metric: which metric; by default the first where larger is better, or else the first, of the clients' own models
            where they have any.

    Returns:
        The matplotlib ``Figure``.

    Raises:
        ValueError: the fit has no validation, or none with this metric.
        ImportError: matplotlib, which the extra ``plots`` brings, is missing.
    """
    known = [name for _, _, names in shown_metrics(by_method([record]), "val") for name in names]
    name = next(iter(known), None) if metric is None else metric
    series = None if name is None else series_of(record, name, "val")
    if series is None:
        raise ValueError(f"metric must be one of {known}, found {name!r}")
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
