# SPDX-License-Identifier: Apache-2.0
"""What a report shows in tables and sentences; ``page.html`` lays it out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fl_lightning.report.number_formats import STAGES, notation, number, plural, shortened
from fl_lightning.report.pictures import both_ends, sentences
from fl_lightning.report.runs_of_a_method import Method, Stage, called, metrics_of, records_of
from fl_lightning.report.summary import MethodSummary, summaries

_LISTED = 200


@dataclass(frozen=True)
class Table:
    """Rows of text or of numbers, folded where there are ``words`` to click on."""

    rows: Sequence[Sequence[str]]
    kind: Literal["text", "numbers"]
    head: Sequence[str] = ()
    words: str = ""
    opened: bool = False


@dataclass(frozen=True)
class Part:
    """What a section has beside pictures."""

    title: str = ""
    tables: Sequence[Table] = ()
    caption: str = ""
    commands: Sequence[str] = ()
    level: int = 2

    def __bool__(self) -> bool:
        return bool(self.tables or self.caption)


@dataclass(frozen=True)
class Summary:
    """The numbers that describe how each method serves the clients, and what it cost."""

    caption: str
    columns: Mapping[str, str]
    forms: Mapping[str, str]
    rows: Sequence[tuple[Method, MethodSummary]]


def comparison(methods: Sequence[Method], stage: Stage) -> Summary | None:
    """One row per method, of the first metric."""
    metrics = metrics_of(records_of(methods), stage)
    if not metrics:
        return None
    metric, mode = next(iter(metrics.items()))
    rows = summaries(methods, metric, stage, mode)
    uneven = ("angle", "angle (rad)") if mode == "max" else ("std", "deviation")
    columns = {"mean": "mean", "worst_10": "worst 10 %", uneven[0]: uneven[1], "worst": "worst client"}
    forms = {key: notation([n for row in rows for n in row.numbers.get(key, {}).values()]) for key in columns}
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
    return Summary(caption, columns, forms, list(zip(methods, rows, strict=True)))


def clients(methods: Sequence[Method], stage: Stage) -> Part:
    """Every client's last value under each method, the worst under the first method on top."""
    found = []
    for metric in metrics_of(records_of(methods), stage):
        points = [method.points(metric, stage) for method in methods]
        order = next((column for column in points if column), [])
        values = [{(point.client_id, point.label): point.value for point in column} for column in points]
        form = notation([value for column in values for value in column.values()])
        rows = [
            [one.label, f"{one.trained:,}", f"{one.size:,}",
             *(number(column.get((one.client_id, one.label)), form) for column in values)]
            for one in (order[k] for k in both_ends(len(order), _LISTED))
        ]  # fmt: skip
        head = ["client", "training samples", f"{STAGES[stage]} samples", *(method.label for method in methods)]
        note = f" (the worst and best, and some between, of {len(order):,})" if len(rows) < len(order) else ""
        found.append(Table(rows, "numbers", head, f"{metric} of {plural(len(rows), 'client')}{note}"))
    return Part("Numbers of all clients", found)


def reasons(methods: Sequence[Method]) -> Part:
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
    return Part("Reasons", [Table(rows, "text", head)] if rows else [], level=3)


def nobody_missing(methods: Sequence[Method]) -> Part:
    """A sentence for fits in which everybody took part."""
    rounds = sum(len(record.rounds) for record in records_of(methods))
    words = f"Every client that was drawn took part, in all of {plural(rounds, 'round')}." if rounds else ""
    return Part("Who was missing", caption=words)


def runs(methods: Sequence[Method]) -> Part:
    """How the fits were made and how to make them again."""
    commands = list(dict.fromkeys(record.command for record in records_of(methods) if record.command))
    words = "The command of this run." if len(commands) == 1 else "The commands of this run." if commands else ""
    rows = []
    for method in methods:
        seeds = ", ".join("-" if record.seed is None else str(record.seed) for record in method.records)
        rates = dict.fromkeys(record.learning_rate for record in method.records)
        shown = ", ".join("-" if rate is None else f"{rate:g}" for rate in rates)
        rows.append([method.label, seeds, shown, ", ".join(dict.fromkeys(r.status for r in method.records))])
    found = [Table(rows, "text", ["method", "seeds", "learning rate", "state"])]
    for method in methods:
        record, alone = method.first, len(methods) == 1
        entries = [
            *_flat("method", record.arguments), *_flat("strategy", record.settings), *_flat("", record.configuration),
        ]  # fmt: skip
        about = "Configuration" if alone else f"Configuration of {shortened(method.label, 60)}"
        found += [Table(entries, "text", (), about, alone)] if entries else []
    known = dict.fromkeys(tuple(record.versions.items()) for record in records_of(methods) if record.versions)
    found += [Table(versions, "text", (), "Versions", True) for versions in known]
    return Part("How to run it again", found, words, commands)


def _flat(name: str, value: Any) -> Iterable[list[str]]:
    """Rows of nested settings, under names with dots."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), entry)
    elif value not in ("", None):
        yield [name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
