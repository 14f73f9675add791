# SPDX-License-Identifier: Apache-2.0
"""What a picture is, and what pictures are made of: specifications for plotly.js in plain values, and one look.

Colours that stand for methods follow those of Okabe and Ito (2008), which people with any form of colour blindness can
tell apart; the dark theme has lighter shades of them. Heat maps of amounts go from the background to one hue.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fl_lightning.report.number_formats import isolated, plural, shortened
from fl_lightning.report.runs_of_a_method import Method

Spec = dict[str, Any]
"""``data``, ``layout`` and ``height`` for plotly.js; colours stand as ``"@ink"``, ``"@c0"`` and so on, which the page
replaces by those of its theme. ``"@c0+22"`` has so much opacity."""

MAX_NAMED = 40  # clients that get a line with their name
COLORS = 8
BETTER = {"max": "up is better", "min": "down is better", "abs": "near 0 is better"}
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


@dataclass(frozen=True)
class Picture:
    """A picture, perhaps in several variants of which the reader sees one at a time."""

    key: str
    title: str  # what one sees, in words
    variants: Mapping[str, Spec]  # what to draw, by the name on its button
    caption: str  # how to read it, and what was thinned out
    choose: str  # what the buttons choose, "metric" for instance


def picture(key: str, title: str, variants: Mapping[str, Spec], *captions: str, choose: str = "") -> Picture | None:
    """A picture with a caption of those sentences that are not empty; ``None`` without any variant."""
    return Picture(key, title, variants, sentences(*captions), choose) if variants else None


def spec(data: Sequence[Spec], x: str, y: str, height: int, **layout: Any) -> Spec:
    """A variant with titled axes; the page adds what all pictures have."""
    axes = {name: {"title": {"text": t}, **layout.pop(name, {})} for name, t in (("xaxis", x), ("yaxis", y))}
    return {"data": list(data), "layout": {**axes, **layout}, "height": height}


def sentences(*parts: str) -> str:
    """Those that are not empty, one after the other."""
    return " ".join(part for part in parts if part)


def escaped(text: str, most: int = 28) -> str:
    """A name as plotly.js shows it: it takes tags in texts for formatting."""
    return _literal(isolated(shortened(text, most)))


def hover_name(text: str) -> str:
    """A whole name, broken into lines that fit."""
    flat = " ".join(text.split()) or "(no name)"
    lines = [flat[start : start + 60] for start in range(0, min(len(flat), 240), 60)]
    return "<br>".join(_literal(isolated(line)) for line in lines)


def _literal(text: str) -> str:
    return html.escape(text, quote=False).replace("$", "&#36;")  # between two of them it looks for formulas


def numbers(values: Sequence[float | int | None] | np.ndarray[Any, Any], kind: str = "f4") -> Any:
    """Numbers as plotly.js reads them fast: typed and in base64; ``None`` becomes a gap."""
    array = np.array([np.nan if v is None else v for v in values] if isinstance(values, Sequence) else values)
    content = base64.b64encode(np.ascontiguousarray(array, dtype=f"<{kind}").tobytes()).decode("ascii")
    shape = {} if array.ndim == 1 else {"shape": ", ".join(map(str, array.shape))}
    return {"bdata": content, "dtype": kind, **shape}


def line(label: str, color: int, x: Sequence[float], y: Sequence[float | None], dash: str = "solid") -> Spec:
    """A line of one method."""
    look, symbol = f"@c{color % COLORS}", SYMBOLS[color // COLORS % len(SYMBOLS)]
    return {
        "type": "scatter", "mode": "lines" if len(x) > 1 else "markers", "name": escaped(label),
        "x": numbers(x), "y": numbers(y), "line": {"color": look, "width": 2, "dash": dash},
        "marker": {"color": look, "size": 7, "symbol": symbol},
        "hovertemplate": f"{escaped(label, 60)}: %{{y:.4~g}}<extra></extra>",
    }  # fmt: skip


def thinned(count: int, most: int) -> list[int]:
    """Places at even distances, the first and the last among them."""
    return list(range(count)) if count <= most else np.linspace(0, count - 1, most).round().astype(int).tolist()


def both_ends(count: int, most: int) -> list[int]:
    """Places of which the first and last quarter of ``most`` are whole, and those between at even distances."""
    if count <= most:
        return list(range(count))
    end = most // 4
    middle = [end + place for place in thinned(count - 2 * end, most - 2 * end)]
    return [*range(end), *middle, *range(count - end, count)]


def binned(values: Sequence[float | None], most: int) -> tuple[list[float | None], int]:
    """Means over stretches of equal lengths, at most so many, and the length; ``None`` counts nowhere."""
    width = max(1, -(-len(values) // most))
    found: list[float | None] = []
    for start in stretches(len(values), width):
        stop = start + width if start + 3 * width // 2 < len(values) else len(values)
        known = [value for value in values[start:stop] if value is not None]
        found.append(sum(known) / len(known) if known else None)
    return found, width


def stretches(count: int, width: int) -> range:
    """Where stretches begin; the last one is longer where the rest would be less than half of one."""
    return range(0, count - width // 2, width)


def means_words(width: int, what: str) -> str:
    """That what is drawn stands for several rounds; empty if it does not."""
    return f"{what} are means over {width} rounds." if width > 1 else ""


def thin_words(count: int, most: int) -> str:
    """That not every client is drawn; empty if they are."""
    if count <= most:
        return ""
    return f"Of {count:,} clients, {most:,} are drawn: the worst and the best quarter of these, and some between."


def first_words(methods: Sequence[Method]) -> str:
    """That one seed of several is drawn."""
    most = max(len(method.fits) for method in methods)
    return "" if most == 1 else f"Of {plural(most, 'seed')}, the first is drawn."
