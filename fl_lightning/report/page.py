# SPDX-License-Identifier: Apache-2.0
"""Writes one HTML file from the records of one or several fits."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path

from fl_lightning.arguments import FILLED, checked
from fl_lightning.core.optional_packages import how_to_install
from fl_lightning.report import client_pictures, cost_pictures, heat_maps, round_pictures, tables
from fl_lightning.report.conclusion import lede
from fl_lightning.report.number_formats import isolated, plural, shortened
from fl_lightning.report.pictures import Picture
from fl_lightning.report.record import FitRecord
from fl_lightning.report.runs_of_a_method import Method, Stage, by_method, shown_stage
from fl_lightning.report.style import DARK, FONTS, LIGHT, Theme

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""The browser itself refuses to ask a network for anything."""


@checked(records=FILLED)
def write_report(records: Sequence[FitRecord], path: str | Path, title: str | None = None) -> Path:
    """Writes a report of one or several fits, methods and seeds side by side, as one self-contained HTML file.

    The file is complete at every moment: it is written beside its place and moved there. It needs no network and has
    everything that the records hold; pictures that lack data are left out.

    Args:
        records: the fits, in the order of the page. Records of one method that differ by their seeds are summed up. The
            first method is what the others are compared with.
        path: the file to write; folders that are missing are made.
        title: heading of the page; default the methods' names.

    Returns:
        The path.

    Raises:
        ValueError: there is no record.
        ImportError: plotly, which the extra ``report`` brings, is missing.
    """
    path = Path(path)
    text = _page(records, plotly_js(), title)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
    return path


def plotly_js() -> str:
    """The library that draws the pictures in the browser.

    Raises:
        ImportError: plotly is missing.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"reports need plotly: {how_to_install('report')}") from error
    return str(get_plotlyjs())


def _page(records: Sequence[FitRecord], library: str, title: str | None) -> str:
    methods, stage = by_method(records), shown_stage(records)
    heading = title or _heading(methods)
    sections = [
        (key, words, found)
        for key, words, parts in _sections(methods, stage)
        if (found := [part for part in parts if part])
    ]
    links = " ".join(f'<a href="#{key}">{escape(words)}</a>' for key, words, _ in sections)
    first = "".join(f"<p>{escape(paragraph).replace(' ± ', '&nbsp;±&nbsp;')}</p>" for paragraph in lede(methods, stage))
    drawn = [part for _, _, parts in sections for part in parts if isinstance(part, Picture)]
    known = {
        "pictures": {entry.key: list(entry.variants.values()) for entry in drawn},
        "themes": {"light": LIGHT.tokens(), "dark": DARK.tokens()},
        "fonts": FONTS,
    }
    # Inside a script element only "<" can end it, and JSON has another spelling for that.
    data = json.dumps(known, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    body = "\n".join(
        f'<section id="{key}" aria-label="{escape(words)}">{"".join(map(_part, parts))}</section>'
        for key, words, parts in sections
    )
    resources = files("fl_lightning.report")
    css, script = ((resources / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="generator" content="fl_lightning">
<title>{escape(heading)}</title>
<link rel="icon" href="data:,">
<style>
:root {{ --fonts: {FONTS}; {_variables(LIGHT)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
{css}</style>
</head>
<body>
<header>
<h1>{escape(heading)}</h1>
<p class="meta">{escape(_facts(records, methods))}</p>
<div class="lede">{first}</div>
<nav aria-label="On this page">{links}</nav>
<noscript><p class="note">The pictures need JavaScript. The tables do not.</p></noscript>
</header>
<main>
{body}
</main>
<script id="pictures" type="application/json">{data}</script>
<script>{library}</script>
<script>
{script}</script>
</body>
</html>
"""


def _sections(methods: list[Method], stage: Stage) -> list[tuple[str, str, list[Picture | str | None]]]:
    """Key, name and parts of each section: pictures, and HTML; parts without data are empty."""
    missing = cost_pictures.missing(methods)
    return [
        ("clients", "Clients", [
            client_pictures.fares(methods, stage), tables.comparison(methods, stage), heat_maps.over_time(methods),
        ]),
        ("rounds", "Rounds", [
            round_pictures.mean_and_worst(methods), round_pictures.unevenness(methods),
            round_pictures.training_loss(methods),
            round_pictures.learning_rate(methods) or _note(round_pictures.learning_rate_in_words(methods)),
        ]),
        ("conflicts", "Conflicts", [round_pictures.conflicts(methods), heat_maps.layer_conflicts(methods)]),
        ("weights", "Weights", [heat_maps.weights(methods)]),
        ("data", "Data", [heat_maps.partition(methods)]),
        ("missing", "Drop-outs and errors", [
            missing or _note(tables.nobody_missing(methods), "Who was missing"), tables.reasons(methods),
        ]),
        ("cost", "Time and memory", [
            cost_pictures.time_in_all(methods), cost_pictures.time_per_round(methods), cost_pictures.memory(methods),
        ]),
        ("numbers", "Numbers of all clients", [tables.clients(methods, stage)]),
        ("run", "Run it again", [tables.runs(methods)]),
    ]  # fmt: skip


def _part(part: Picture | str) -> str:
    if isinstance(part, str):
        return part
    buttons = ""
    if len(part.variants) > 1:
        pressed = "".join(
            f'<button type="button" data-picture="{part.key}" data-variant="{place}" '
            f'aria-pressed="{"false" if place else "true"}"><bdi>{escape(shortened(label, 40))}</bdi></button>'
            for place, label in enumerate(part.variants)
        )
        buttons = f'<div class="buttons" role="group" aria-label="{escape(part.choose)}">{pressed}</div>'
    height = next(iter(part.variants.values()))["height"]
    caption = f'<p class="caption">{escape(part.caption)}</p>' if part.caption else ""
    return (
        f'<figure id="{part.key}"><h2>{escape(part.title)}</h2>{caption}{buttons}'
        f'<div class="plot" id="plot-{part.key}" role="img" aria-label="{escape(part.title)}" '
        f'style="min-height:{height}px"></div></figure>'
    )


def _note(text: str, title: str = "") -> str:
    return (f"<h2>{escape(title)}</h2>" if title and text else "") + (
        f'<p class="caption">{escape(text)}</p>' * bool(text)
    )


def _heading(methods: Sequence[Method]) -> str:
    labels = [isolated(shortened(method.label, 40)) for method in methods]
    if len(labels) > 4:
        return f"{_counted(methods)}: {', '.join(labels[:3])} and others"
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))


def _counted(methods: Sequence[Method]) -> str:
    """How many methods and bounds there are."""
    bounds = sum(method.is_bound for method in methods)
    return plural(len(methods) - bounds, "method") + (f" and {plural(bounds, 'bound')}" if bounds else "")


def _facts(records: Sequence[FitRecord], methods: Sequence[Method]) -> str:
    """Size and state of what is shown."""
    clients = max(len(record.client_names) for record in records)
    rounds = max(len(record.rounds) for record in records)
    facts = [plural(clients, "client"), plural(rounds, "round")] if clients else [plural(rounds, "round")]
    if len(records) > 1:
        most = max(methods, key=lambda method: len(method.fits))
        facts += [_counted(methods)] + ([most.repeated] if len(most.fits) > 1 else [])
    running = [record for record in records if record.status == "runs"]
    if running:
        planned = running[0].planned_rounds
        facts.append(f"the fit runs{'' if planned is None else f', {planned:,} rounds are planned'}: reload for news")
    broken = sum(record.status == "interrupted" for record in records)
    if broken:
        facts.append("interrupted" if len(records) == 1 else f"{broken} fits were interrupted")
    return " · ".join([*facts, f"written {datetime.now():%Y-%m-%d %H:%M:%S}"])


def _variables(theme: Theme) -> str:
    return " ".join(f"--{name}: {color};" for name, color in theme.tokens().items() if isinstance(color, str))
