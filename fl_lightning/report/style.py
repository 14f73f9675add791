# SPDX-License-Identifier: Apache-2.0
"""One look for all pictures: those of the report in a browser, and those that matplotlib draws.

Colours that stand for methods follow those of Okabe and Ito (2008), which people with any form of colour blindness can
tell apart; the dark theme has lighter shades of them. Heat maps of amounts go from the background to one hue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Noto Sans", sans-serif'


@dataclass(frozen=True)
class Theme:
    """Colours of a page and of its pictures; scales go from none to most."""

    paper: str  # background
    panel: str  # background of tables and boxes
    ink: str
    muted: str  # text that matters less, and lines of reference
    grid: str  # lines of grids and borders
    colors: tuple[str, ...]  # of methods, in the order in which they are given out
    blue: tuple[str, ...]  # amounts
    red: tuple[str, ...]  # amounts of what is bad
    values: tuple[str, ...]  # from the lowest to the highest
    weights: tuple[str, ...]  # also 0 differs from an empty place
    signed: tuple[str, ...]  # 0 is in the middle

    def tokens(self) -> dict[str, str | list[tuple[float, str]]]:
        """Every colour by the name that pictures have for it, scales as plotly.js reads them."""
        scales = {name: getattr(self, name) for name in ("blue", "red", "values", "weights", "signed")}
        return {
            **{name: getattr(self, name) for name in ("paper", "panel", "ink", "muted", "grid")},
            **{f"c{place}": color for place, color in enumerate(self.colors)},
            **{name: [(k / (len(s) - 1), color) for k, color in enumerate(s)] for name, s in scales.items()},
        }


_CIVIDIS = ("#00204c", "#213d6b", "#555b6c", "#7b7a77", "#a59c74", "#d3c064", "#ffe945")

LIGHT = Theme(
    paper="#ffffff",
    panel="#f6f7f9",
    ink="#1c2127",
    muted="#5c6670",
    grid="#e3e6ea",
    colors=("#0072b2", "#d55e00", "#009e73", "#b5588f", "#c58a00", "#3a9fd1", "#5b5fc7", "#6b6b6b"),
    blue=("#f3f7fb", "#c3dcef", "#7fb4da", "#3285bd", "#0b5a94", "#063a63"),
    red=("#faf6f3", "#f8d5bf", "#f1a679", "#de7433", "#b54a0a", "#7a2f03"),
    values=_CIVIDIS,
    weights=("#dbe8f3", "#a9cde8", "#6aa8d4", "#2c7fb8", "#0b5590", "#04305a"),
    signed=("#8a3300", "#d9722e", "#f3c3a0", "#e4e7ea", "#a9cde8", "#3a8cc4", "#04305a"),
)
DARK = Theme(
    paper="#14181d",
    panel="#1c2229",
    ink="#e6e9ed",
    muted="#9aa5b1",
    grid="#2d353f",
    colors=("#4ba9e3", "#ff8f4a", "#37c79b", "#e39ac6", "#e8b53e", "#9ad6f7", "#a5a8f5", "#b5b5b5"),
    blue=("#1a212a", "#173a58", "#1b5a8c", "#2f83c0", "#6cb3e6", "#c5e4fb"),
    red=("#211d1b", "#51291a", "#8a4117", "#c8651f", "#f2955a", "#ffd6bb"),
    values=_CIVIDIS,
    weights=("#1f3a52", "#1f5684", "#2a7ab8", "#55a3dc", "#96cbf2", "#dff1ff"),
    signed=("#ffc49b", "#e0762f", "#7a3b17", "#343c46", "#1f5684", "#4b9bd6", "#cfe9ff"),
)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "pentagon", "star")


def matplotlib_style() -> dict[Any, Any]:
    """Settings for ``matplotlib.rc_context`` that give figures this look."""
    from cycler import cycler

    return {
        "axes.axisbelow": True,
        "axes.edgecolor": LIGHT.muted,
        "axes.grid": True,
        "axes.labelcolor": LIGHT.ink,
        "axes.prop_cycle": cycler(color=LIGHT.colors),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": LIGHT.ink,
        "axes.titlelocation": "left",
        "axes.titlesize": "medium",
        "figure.facecolor": LIGHT.paper,
        "figure.dpi": 120,
        "grid.color": LIGHT.grid,
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "savefig.dpi": 150,
        "text.color": LIGHT.ink,
        "xtick.color": LIGHT.muted,
        "xtick.labelcolor": LIGHT.ink,
        "ytick.color": LIGHT.muted,
        "ytick.labelcolor": LIGHT.ink,
    }
