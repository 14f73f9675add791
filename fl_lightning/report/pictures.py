# SPDX-License-Identifier: Apache-2.0
"""What a picture is: figures of plotly, their look in light and dark, and which of many clients they show.

People with any form of colour blindness can tell the colours of each two methods apart (by at least 15 units of CIELAB,
as Machado et al. (2009) simulate it). Each stands out from light and dark paper, with a contrast of 3:1 or more.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fl_lightning.report.number_formats import isolated, shortened

MAX_NAMED = 40  # clients that get a line with their name
BETTER = {"max": "up is better", "min": "down is better", "abs": "near 0 is better"}
FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Noto Sans", sans-serif'


@dataclass(frozen=True)
class Theme:
    """Colours of a page and of its pictures."""

    paper: str  # background
    panel: str  # background of boxes
    ink: str
    muted: str  # text that matters less, and lines of reference
    grid: str  # lines of grids and borders

    colors: ClassVar[tuple[str, ...]] = (
        "#0d86cb", "#e46d00", "#0fa860", "#9c4d8f", "#c82f34", "#5958d0", "#7c35f3", "#7d7d7d",
    )  # fmt: skip
    """Of methods, in the order in which they are given out."""

    def template(self) -> dict[str, Any]:
        """What plotly draws wherever a figure says nothing else."""
        lines = dict.fromkeys(("gridcolor", "linecolor", "tickcolor", "zerolinecolor"), self.grid)
        title = {"standoff": 10, "font": {"size": 12, "color": self.muted}}
        axis = {**lines, "automargin": True, "hoverformat": ".4~g", "title": title}
        bar = {"thickness": 10, "outlinewidth": 0, "title": {"side": "right"}}
        return {
            "data": {
                "heatmap": [{"colorbar": bar, "colorscale": "Cividis", "hoverongaps": False}],
                "scatter": [{"marker": {"line": {"width": 0.5, "color": self.paper}}}],
            },
            "layout": {
                "font": {"family": FONTS, "size": 12, "color": self.ink},
                "hoverlabel": {"align": "left", "bgcolor": self.panel, "font": {"color": self.ink}, "namelength": -1},
                "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
                "margin": {"l": 44, "r": 8, "t": 8, "b": 44},
                "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": self.muted, "activecolor": self.ink},
                "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "xaxis": axis, "yaxis": axis,
            },
        }  # fmt: skip


LIGHT = Theme(paper="#ffffff", panel="#f6f7f9", ink="#1c2127", muted="#5c6670", grid="#e3e6ea")
DARK = Theme(paper="#14181d", panel="#1c2229", ink="#e6e9ed", muted="#9aa5b1", grid="#2d353f")


@dataclass(frozen=True)
class Picture:
    """A picture, perhaps in several variants of which the reader sees one at a time."""

    key: str
    title: str  # what one sees, in words
    variants: Mapping[str, Any]  # figures of plotly, by the name on their button
    caption: str  # how to read it, and what was left out
    choose: str  # what the buttons choose, "metric" for instance


def picture(key: str, title: str, variants: Mapping[str, Any], *captions: str, choose: str = "") -> Picture | None:
    """A picture with a caption of those sentences that are not empty; ``None`` without any variant."""
    return Picture(key, title, variants, sentences(*captions), choose) if variants else None


def figure(x: str, y: str, height: int, **layout: Any) -> Any:
    """An empty figure of plotly with titled axes; the page adds the template of the reader's theme."""
    from plotly.graph_objects import Figure

    return Figure(layout={"template": "none", "height": height, **layout}).update_layout(
        xaxis_title_text=x, yaxis_title_text=y
    )


def color_of(place: int) -> str:
    """The colour of a method, by its place on the page."""
    return Theme.colors[place % len(Theme.colors)]


def sentences(*parts: str) -> str:
    """Those that are not empty, one after the other."""
    return " ".join(part for part in parts if part)


def escaped(text: str, most: int = 28) -> str:
    """A name as plotly shows it: it takes tags in texts for formatting, and what is between dollars for a formula."""
    return html.escape(isolated(shortened(text, most)), quote=False).replace("$", "&#36;")


def hover_name(text: str) -> str:
    """A whole name, broken into lines that fit."""
    return "<br>".join(escaped(line, 60) for line in textwrap.wrap(text, 60, max_lines=4) or [text])


def both_ends(count: int, most: int) -> list[int]:
    """The first and the last places, half of ``most`` each; all where there are no more."""
    return list(range(count)) if count <= most else [*range(most // 2), *range(count - most // 2, count)]


def thin_words(count: int, most: int) -> str:
    """That not every client is drawn; empty if they are."""
    return (
        "" if count <= most else f"Of {count:,} clients, the worst {most // 2:,} and the best {most // 2:,} are drawn."
    )
