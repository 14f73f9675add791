# SPDX-License-Identifier: Apache-2.0
"""The report's tables, as HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.cost_pictures import reasons as reason_rows
from fl_lightning.report.number_formats import (
    STAGES,
    Spread,
    notation,
    number,
    percent,
    plural,
    seconds,
    shortened,
    spread,
)
from fl_lightning.report.pictures import COLORS, both_ends
from fl_lightning.report.repetitions import Repetition, mark
from fl_lightning.report.runs_of_a_method import Method, Stage, goodness, metrics_of

_LISTED = 200


def comparison(methods: Sequence[Method], stage: Stage) -> str:
    """One row per method: the numbers that describe how it serves the clients, and what it cost."""
    metrics = metrics_of([record for method in methods for record in method.records], stage)
    if not metrics:
        return ""
    metric, mode = next(iter(metrics.items()))
    keys = {"mean": "mean", "worst_10": "worst 10 %"} | (
        {"angle": "angle (rad)"} if mode == "max" else {"std": "deviation"}
    )
    head = ["method", *keys.values(), "worst client", "conflicts", "rounds", "time"]
    own = [method.own(metric, stage) for method in methods]
    figures = {
        key: [method.summary(name, stage, key) for method, name in zip(methods, own, strict=True)] for key in keys
    }
    figures["worst"] = [method.worst(name, stage) for method, name in zip(methods, own, strict=True)]
    forms = {key: notation([n for by_seed in found for n in by_seed.values()]) for key, found in figures.items()}
    rows = []
    for place, method in enumerate(methods):
        swatch = f'<span class="swatch" style="background:var(--c{place % COLORS})"></span>'
        seeds = f'<span class="name">{method.repeated}</span>' if len(method.records) > 1 else ""
        cells = [f"<td>{swatch}{escape(shortened(method.label, 60))}{seeds}</td>"]
        for key in keys:
            first, found = figures[key][0], figures[key][place]
            marked = _mark(first, found, mode if key in ("mean", "worst_10") else "min") if place else ""
            cells.append(f"<td><span{marked}>{_spread(found, forms[key])}</span></td>")
        points, worst = method.points(own[place], stage), figures["worst"][place]
        name = f'<span class="name"><bdi>{escape(shortened(points[0].label, 48))}</bdi></span>' if points else ""
        marked = _mark(figures["worst"][0], worst, mode) if place else ""
        share = method.conflicts
        cells += [
            f"<td><span{marked}>{_spread(worst, forms['worst'])}</span>{name}</td>",
            f"<td>{'-' if share is None else percent(share)}</td>",
            f"<td>{max(len(record.rounds) for record in method.records) or '-'}</td>",
            f"<td>{'-' if method.seconds is None else seconds(method.seconds.mean)}</td>",
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    marks = (
        f" ▲ and ▼: better and worse than {methods[0].label}: the 95 % interval of the differences, seed by "
        "seed, leaves out zero."
        if len(methods) > 1 and max(len(method.records) for method in methods) > 1
        else ""
    )
    names = " and ".join(method.label for method in methods if method.is_bound)
    bounds = f" No methods, but plain training to measure them by: {names}." if names else ""
    having = " and ".join(method.label for method, name in zip(methods, own, strict=True) if name != metric)
    models = f" Clients have models of their own with {having}: the values of these count." if having else ""
    caption = (
        f"{metric} in the {STAGES[stage]}. Worst client: whose value is worst. Conflicts: share of a round's clients "
        "whose update the step went against. Time: training, server and evaluation of all rounds."
        f"{models}{marks}{bounds}"
    )
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return (
        f'<h3>In numbers</h3><p class="caption">{escape(caption)}</p>'
        f'<div class="table"><table class="numbers"><thead><tr>{header}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _spread(numbers: Mapping[Repetition, float], form: str) -> str:
    return spread(Spread.over(numbers), form)


def _mark(base: Mapping[Repetition, float], found: Mapping[Repetition, float], mode: Mode) -> str:
    """Whether a number differs from the first method's by more than repetitions do."""
    base, found = ({one: goodness(value, mode) for one, value in each.items()} for each in (base, found))
    return {"+": ' class="better"', "-": ' class="worse"', "": ""}[mark(found, base, larger_is_better=True)]


def clients(methods: Sequence[Method], stage: Stage) -> str:
    """Every client's last value under each method, the worst under the first method on top."""
    metrics = metrics_of([record for method in methods for record in method.records], stage)
    parts = []
    for metric in metrics:
        points = [method.points(metric, stage) for method in methods]
        order = next((found for found in points if found), [])
        chosen = both_ends(len(order), _LISTED)
        values = [{(point.client_id, point.name): point.value for point in found} for found in points]
        form = notation([value for column in values for value in column.values()])
        rows = [
            [order[k].label, f"{order[k].trained:,}", f"{order[k].size:,}",
             *(number(column.get((order[k].client_id, order[k].name)), form) for column in values)]
            for k in chosen
        ]  # fmt: skip
        head = ["client", "training samples", f"{STAGES[stage]} samples", *(method.label for method in methods)]
        note = f" (the worst and best, and some between, of {len(order):,})" if len(chosen) < len(order) else ""
        parts.append(
            f"<details><summary>{escape(metric)} of {plural(len(chosen), 'client')}{note}</summary>"
            f"{_table(head, rows, 'numbers')}</details>"
        )
    return f"<h2>Numbers of all clients</h2>{''.join(parts)}" if parts else ""


def reasons(methods: Sequence[Method]) -> str:
    """Why clients were left out."""
    rows = reason_rows(methods)
    if not rows:
        return ""
    head = ["method", "reason", "times", "rounds", "clients"]
    return f"<h3>Reasons</h3>{_table(head, rows, 'text')}"


def runs(methods: Sequence[Method]) -> str:
    """How the fits were made and how to make them again."""
    parts = []
    commands = {record.command: None for method in methods for record in method.records if record.command}
    parts += [f"<pre>{escape(command)}</pre>" for command in commands]
    if parts:
        parts.insert(
            0, f'<p class="caption">{"The command" if len(commands) == 1 else "The commands"} of this run.</p>'
        )
    parts.append(_seeds(methods))
    for method in methods:
        record = method.records[0]
        rows = [
            *_flat("method", record.arguments), *_flat("strategy", record.settings), *_flat("", record.configuration),
        ]  # fmt: skip
        if rows:
            opened = " open" if len(methods) == 1 else ""
            words = "Configuration" if len(methods) == 1 else f"Configuration of {shortened(method.label, 60)}"
            parts.append(f"<details{opened}><summary>{escape(words)}</summary>{_table(None, rows, 'text')}</details>")
    known = {tuple(record.versions.items()): None for method in methods for record in method.records if record.versions}
    parts += [
        f"<details open><summary>Versions</summary>{_table(None, map(list, found), 'text')}</details>"
        for found in known
    ]
    return f"<h2>How to run it again</h2>{''.join(parts)}"


def _seeds(methods: Sequence[Method]) -> str:
    rows = []
    for method in methods:
        seeds = ", ".join("-" if record.seed is None else str(record.seed) for record in method.records)
        rates = dict.fromkeys(record.learning_rate for record in method.records)
        shown = ", ".join("-" if rate is None else f"{rate:g}" for rate in rates)
        rows.append([method.label, seeds, shown, ", ".join(dict.fromkeys(r.status for r in method.records))])
    return _table(["method", "seeds", "learning rate", "state"], rows, "text")


def _flat(name: str, value: Any) -> Iterable[list[str]]:
    """Rows of nested settings, under names with dots."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), entry)
    elif value not in ("", None):
        yield [name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]


def _table(head: Sequence[str] | None, rows: Iterable[Sequence[str]], kind: str) -> str:
    header = (
        ""
        if head is None
        else f"<thead><tr>{''.join(f'<th><bdi>{escape(cell)}</bdi></th>' for cell in head)}</tr></thead>"
    )
    body = "".join(f"<tr>{''.join(f'<td><bdi>{escape(cell)}</bdi></td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table class="{kind}">{header}<tbody>{body}</tbody></table></div>'
