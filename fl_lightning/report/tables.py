# SPDX-License-Identifier: Apache-2.0
"""The report's tables, as HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import isnan
from typing import Any

from fl_lightning.report.number_formats import (
    STAGES,
    client_label,
    duration,
    notation,
    number,
    percent,
    plural,
    shortened,
    spread,
)
from fl_lightning.report.pictures import COLORS, both_ends, sentences
from fl_lightning.report.runs_of_a_method import Method, Stage, called, metrics_of, records_of
from fl_lightning.report.summary import Figure, summaries

_LISTED = 200
_MARKS = {"+": ' class="better"', "-": ' class="worse"', "": ""}


def comparison(methods: Sequence[Method], stage: Stage) -> str:
    """One row per method: the numbers that describe how it serves the clients, and what it cost."""
    metrics = metrics_of(records_of(methods), stage)
    if not metrics:
        return ""
    metric, mode = next(iter(metrics.items()))
    rows = summaries(methods, metric, stage, mode)
    uneven = ("angle", "angle (rad)") if mode == "max" else ("std", "deviation")
    keys = {"mean": "mean", "worst_10": "worst 10 %", uneven[0]: uneven[1], "worst": "worst client"}
    forms = {key: notation([n for row in rows for n in row.numbers.get(key, {}).values()]) for key in keys}
    lines = []
    for place, (method, row) in enumerate(zip(methods, rows, strict=True)):
        swatch = f'<span class="swatch" style="background:var(--c{place % COLORS})"></span>'
        cells = [f"{swatch}{escape(shortened(row.method, 60))}{_name(method.repeated) if row.repetitions > 1 else ''}"]
        for key in keys:
            figure: Figure = getattr(row, key)
            cells.append(f"<span{_MARKS[figure.mark]}>{spread(figure.spread, forms[key])}</span>")
        cells[-1] += _name(client_label(row.worst_client)) if row.worst_client else ""
        cells += [
            "-" if isnan(row.conflicts) else percent(row.conflicts),
            str(max(len(record.rounds) for record in method.records) or "-"),
            "-" if isnan(row.seconds) else duration(row.seconds),
        ]
        lines.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    several = len(rows) > 1 and max(row.repetitions for row in rows) > 1
    bounds = " and ".join(row.method for row in rows if row.bound)
    having = " and ".join(method.label for method in methods if method.own(metric, stage) != metric)
    caption = sentences(
        f"{metric} in the {STAGES[stage]}. Worst client: whose value is worst. Conflicts: share of a round's clients "
        "whose update the step went against. Time: training, server and evaluation of all rounds.",
        f"Clients have models of their own with {having}: the values of these count." if having else "",
        f"▲ and ▼: better and worse than {rows[0].method}: the 95 % interval of the differences, seed by seed, leaves "
        "out zero."
        if several
        else "",
        f"No methods, but plain training to measure them by: {bounds}." if bounds else "",
    )
    head = "".join(f"<th>{cell}</th>" for cell in ("method", *keys.values(), "conflicts", "rounds", "time"))
    return (
        f'<h3>In numbers</h3><p class="caption">{escape(caption)}</p><div class="table"><table class="numbers">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _name(text: str) -> str:
    return f'<span class="name"><bdi>{escape(shortened(text, 48))}</bdi></span>'


def clients(methods: Sequence[Method], stage: Stage) -> str:
    """Every client's last value under each method, the worst under the first method on top."""
    parts = []
    for metric in metrics_of(records_of(methods), stage):
        points = [method.points(metric, stage) for method in methods]
        order = next((found for found in points if found), [])
        values = [{(point.client_id, point.label): point.value for point in found} for found in points]
        form = notation([value for column in values for value in column.values()])
        rows = [
            [one.label, f"{one.trained:,}", f"{one.size:,}",
             *(number(column.get((one.client_id, one.label)), form) for column in values)]
            for one in (order[k] for k in both_ends(len(order), _LISTED))
        ]  # fmt: skip
        head = ["client", "training samples", f"{STAGES[stage]} samples", *(method.label for method in methods)]
        note = f" (the worst and best, and some between, of {len(order):,})" if len(rows) < len(order) else ""
        parts.append(_folded(f"{metric} of {plural(len(rows), 'client')}{note}", _table(rows, "numbers", head)))
    return f"<h2>Numbers of all clients</h2>{''.join(parts)}" if parts else ""


def reasons(methods: Sequence[Method]) -> str:
    """Why clients were left out."""
    rows = []
    for method, record in [(each, record) for each in methods for record in each.records]:
        label = method.label if len(method.fits) == 1 else f"{method.label}, seed {record.seed}"
        for entry in record.absences:
            first, last = entry.first_round + 1, entry.last_round + 1
            names = ", ".join(called(record, client) for client in entry.client_ids[:5])
            more = " and others" if len(entry.client_ids) > 5 else ""
            rounds = f"{first}" if first == last else f"{first} to {last}"
            rows.append([label, entry.reason, f"{entry.count:,}", rounds, names + more])
    head = ["method", "reason", "times", "rounds", "clients"]
    return f"<h3>Reasons</h3>{_table(rows, 'text', head)}" if rows else ""


def nobody_missing(methods: Sequence[Method]) -> str:
    """A sentence for fits in which everybody took part."""
    rounds = sum(len(record.rounds) for record in records_of(methods))
    return f"Every client that was drawn took part, in all of {plural(rounds, 'round')}." if rounds else ""


def runs(methods: Sequence[Method]) -> str:
    """How the fits were made and how to make them again."""
    commands = dict.fromkeys(record.command for record in records_of(methods) if record.command)
    words = "The command of this run." if len(commands) == 1 else "The commands of this run."
    parts = [f'<p class="caption">{words}</p>'] if commands else []
    parts += [f"<pre>{escape(command)}</pre>" for command in commands]
    rows = []
    for method in methods:
        seeds = ", ".join("-" if record.seed is None else str(record.seed) for record in method.records)
        rates = dict.fromkeys(record.learning_rate for record in method.records)
        shown = ", ".join("-" if rate is None else f"{rate:g}" for rate in rates)
        rows.append([method.label, seeds, shown, ", ".join(dict.fromkeys(r.status for r in method.records))])
    parts.append(_table(rows, "text", ["method", "seeds", "learning rate", "state"]))
    for method in methods:
        record, alone = method.first, len(methods) == 1
        entries = [
            *_flat("method", record.arguments), *_flat("strategy", record.settings), *_flat("", record.configuration),
        ]  # fmt: skip
        words = "Configuration" if alone else f"Configuration of {shortened(method.label, 60)}"
        parts += [_folded(words, _table(entries, "text"), alone)] if entries else []
    known = dict.fromkeys(tuple(record.versions.items()) for record in records_of(methods) if record.versions)
    parts += [_folded("Versions", _table(found, "text"), True) for found in known]
    return f"<h2>How to run it again</h2>{''.join(parts)}"


def _flat(name: str, value: Any) -> Iterable[list[str]]:
    """Rows of nested settings, under names with dots."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), entry)
    elif value not in ("", None):
        yield [name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]


def _folded(words: str, content: str, opened: bool = False) -> str:
    return f"<details{' open' * opened}><summary>{escape(words)}</summary>{content}</details>"


def _table(rows: Iterable[Sequence[str]], kind: str, head: Sequence[str] = ()) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}><bdi>{escape(cell)}</bdi></{tag}>' for cell in cells)}</tr>"

    header = f"<thead>{row(head, 'th')}</thead>" if head else ""
    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="table"><table class="{kind}">{header}<tbody>{body}</tbody></table></div>'
