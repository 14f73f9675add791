# SPDX-License-Identifier: Apache-2.0
"""A figure of matplotlib in the style of the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_lightning.report.pictures import LIGHT


@contextmanager
def new_figure(width: float, height: float, path: Path) -> Iterator[Any]:
    """A figure to draw into, which is saved at the end.

    It is not pyplot's: it works without a display, and leaves nothing open behind it.
    """
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {
        "axes.axisbelow": True, "axes.edgecolor": LIGHT.muted, "axes.grid": True, "axes.labelcolor": LIGHT.ink,
        "axes.prop_cycle": cycler(color=LIGHT.colors), "axes.spines.right": False, "axes.spines.top": False,
        "axes.titlecolor": LIGHT.ink, "axes.titlelocation": "left", "axes.titlesize": "medium",
        "figure.facecolor": LIGHT.paper, "figure.dpi": 120, "grid.color": LIGHT.grid, "grid.linewidth": 0.8,
        "legend.frameon": False, "lines.linewidth": 1.8, "savefig.dpi": 150, "text.color": LIGHT.ink,
        "xtick.color": LIGHT.muted, "xtick.labelcolor": LIGHT.ink, "ytick.color": LIGHT.muted,
        "ytick.labelcolor": LIGHT.ink,
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path)
