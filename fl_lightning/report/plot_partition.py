# SPDX-License-Identifier: Apache-2.0
"""Draws who holds which classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from fl_lightning.arguments import ANY, check, checked, shown
from fl_lightning.report.figures import new_figure
from fl_lightning.report.style import LIGHT


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
