# SPDX-License-Identifier: Apache-2.0
"""A figure of matplotlib in the style of the report: who holds what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.arguments import checked
from fl_lightning.core.errors import how_to_install
from fl_lightning.report.pictures import LIGHT


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


@checked()
def plot_partition(
    label_counts: Tensor,
    path: str | Path | None = None,
    *,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
) -> Any:
    """Draws a partition: clients across, classes up, and bubbles whose areas are the counts.

    Args:
        label_counts: ``[N, C]`` samples of each client in each class, as ``FederatedDataModule.label_counts()`` gives.
        path: file to write; its suffix chooses the format.
        class_names: one name per class; default their column numbers.
        title: heading; default a sentence of numbers.

    Returns:
        The matplotlib ``Figure``.

    Raises:
        ImportError: matplotlib, which the extra ``plots`` brings, is missing.
        ValueError: ``label_counts`` is not a non-empty matrix of non-negative numbers, or the names do not fit.
    """
    if label_counts.dim() != 2 or label_counts.numel() == 0 or bool((label_counts < 0).any()):
        raise ValueError(f"label_counts must be a non-empty [N, C] matrix of counts, found {list(label_counts.shape)}")
    counts = label_counts.cpu().numpy()
    clients, classes = counts.shape
    names = [str(number) for number in range(classes)] if class_names is None else list(class_names)
    if len(names) != classes:
        raise ValueError(f"class_names must hold {classes} names, found {len(names)}")
    width, height = min(max(5.0, 1.8 + 0.16 * clients), 16.0), min(max(2.8, 1.4 + 0.24 * classes), 9.0)
    with new_figure("plot_partition", width, height, path) as figure:
        from matplotlib.ticker import MaxNLocator

        axes, sizes = figure.subplots(), counts.sum(axis=1)
        client, column = np.nonzero(counts)
        # The largest bubble nearly has the area of its cell. `s` is in square points, 72 of them to an inch and side.
        cell = (0.8 * width / clients) * (0.7 * height / classes) * 72**2
        areas = counts[client, column] / counts.max() * min(0.75 * cell, 700.0)
        axes.scatter(client, column, s=np.maximum(areas, 0.5), color=LIGHT.colors[0], alpha=0.85, linewidths=0)
        sentence = (
            f"{clients} clients, {sizes.min()} to {sizes.max()} samples each\nlargest bubble: {counts.max()} samples"
        )
        axes.set_title(sentence if title is None else title)
        axes.set(xlabel="client", xlim=(-0.7, clients - 0.3), ylabel="class", ylim=(-0.7, classes - 0.3))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        step = -(-classes // 30)
        axes.set_yticks(range(0, classes, step), names[::step])
    return figure
