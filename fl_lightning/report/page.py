# SPDX-License-Identifier: Apache-2.0
"""Writes one HTML file from the records of one or several fits."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.arguments import FILLED, checked, listed
from fl_lightning.core.errors import how_to_install
from fl_lightning.core.storage.files import write_text
from fl_lightning.report import client_pictures, gains, round_pictures, tables
from fl_lightning.report.conclusion import lede
from fl_lightning.report.number_formats import isolated, plural, shortened
from fl_lightning.report.pictures import DARK, FONTS, LIGHT, Picture
from fl_lightning.report.record import FitRecord
from fl_lightning.report.runs_of_a_method import Method, Stage, by_method, shown_stage
from fl_lightning.report.tables import Part, Summary

if TYPE_CHECKING:
    from jinja2 import Template


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
    write_text(path, _page(records, plotly_js(), title))
    return path


def plotly_js() -> str:
    """The library that draws the pictures in the browser; raises ImportError where plotly is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"reports need plotly: {how_to_install('report')}") from error
    return str(get_plotlyjs())


def _page(records: Sequence[FitRecord], library: str, title: str | None) -> str:
    from plotly.io.json import to_json_plotly

    methods, stage = by_method(records), shown_stage(records)
    table = tables.comparison(methods, stage)
    found = [(key, words, [part for part in parts if part]) for key, words, parts in _sections(methods, stage, table)]
    drawn = [part for _, _, parts in found for part in parts if isinstance(part, Picture)]
    figures = {picture.key: list(picture.variants.values()) for picture in drawn}
    templates = {"light": LIGHT.template(), "dark": DARK.template()}
    return _template().render(
        heading=title or _heading(methods),
        facts=_facts(records, methods),
        lede=lede(methods, stage, table),
        sections=[section for section in found if section[2]],
        drawn=to_json_plotly({"figures": figures, "templates": templates}),
        library=library,
    )


def table_page(heading: str, lede: Sequence[str], parts: Sequence[Part]) -> str:
    """A page in the report's look with tables alone, a section per part; needs jinja2 and no plotly."""
    try:
        template = _template()
    except ImportError as error:
        raise ImportError(f"pages need jinja2: {how_to_install('report')}") from error
    sections = [(f"part-{place}", part.title, [part]) for place, part in enumerate(parts)]
    return template.render(heading=heading, facts=_written(), lede=lede, sections=sections, drawn="", library="")


@cache
def _template() -> Template:
    """``page.html``, with all that is the same on every page; it is read once, because a fit writes many pages."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters["shortened"] = shortened
    resources = files("fl_lightning.report")
    template, css, script = ((resources / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    themes = {"light": LIGHT, "dark": DARK}
    same = {"themes": themes, "fonts": FONTS, "css": css, "script": script}
    return environment.from_string(template, same)


def _sections(
    methods: list[Method], stage: Stage, table: Summary | None
) -> list[tuple[str, str, list[Picture | Part | None]]]:
    """Key, name and parts of each section; parts without data are ``None``."""
    clients = client_pictures
    gained = {} if table is None else gains.gain_tables(methods, table.metric, stage, table.mode)
    numbers, joining = (None, None) if table is None else (table.part, gains.joining(gained, table.metric))
    return [
        ("clients", "Clients", [clients.fares(methods, stage), numbers, clients.over_time(methods)]),
        ("joining", "Should a client join?", [joining]),
        ("rounds", "Rounds", [
            round_pictures.mean_and_worst(methods), round_pictures.training_loss(methods),
            round_pictures.conflicts(methods),
        ]),
        ("data", "Data", [clients.partition(methods)]),
        ("missing", "Drop-outs and errors", [tables.reasons(methods)]),
        ("cost", "Time and memory", [tables.costs(methods)]),
        ("numbers", "Numbers of all clients", [tables.clients(methods, stage)]),
        ("run", "Run it again", [tables.runs(methods)]),
    ]  # fmt: skip


def _heading(methods: Sequence[Method]) -> str:
    labels = [isolated(shortened(method.label, 40)) for method in methods]
    if len(labels) > 4:
        return f"{_counted(methods)}: {', '.join(labels[:3])} and others"
    return listed(labels, "and")


def _counted(methods: Sequence[Method]) -> str:
    bounds = sum(method.is_bound for method in methods)
    return plural(len(methods) - bounds, "method") + (f" and {plural(bounds, 'bound')}" if bounds else "")


def _facts(records: Sequence[FitRecord], methods: Sequence[Method]) -> str:
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
    return " · ".join([*facts, _written()])


def _written() -> str:
    return f"written {datetime.now():%Y-%m-%d %H:%M:%S}"
