# SPDX-License-Identifier: Apache-2.0
"""The table of methods, with numbers over repetitions and marks of differences, and the other tables of a report.

``page.html`` and ``comparison/table.py`` lay them out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from statistics import fmean
from typing import Any, Literal

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.number_formats import (
    STAGES,
    duration,
    in_bytes,
    notation,
    number,
    percent,
    plural,
    shortened,
    spread,
)
from fl_lightning.report.pictures import both_ends, sentences
from fl_lightning.report.repetitions import Estimate, Repetition, mark
from fl_lightning.report.runs_of_a_method import (
    SPENT,
    Method,
    Stage,
    label_of,
    metrics_of,
    records_of,
    seconds_of,
    shown_metrics,
)

_LISTED = 200
_UNKNOWN = Estimate()


@dataclass(frozen=True)
class MethodSummary:
    """A row of the table."""

    method: str
    bound: str = ""  # what the bound is called, if the row is one
    learning_rate: float | None = None  # of its clients; None without a single one
    repetitions: int = 0  # that ran to their end
    mean: Estimate = _UNKNOWN  # over the clients
    worst_10: Estimate = _UNKNOWN  # over the worst tenth of them
    worst_client: str = ""  # with the worst mean over the seeds; empty where several divisions make clients anew
    worst: Estimate = _UNKNOWN  # its value; with several divisions, that of the worst client of each
    angle: Estimate = _UNKNOWN  # fairness angle in radians; without numbers where small values are good
    std: Estimate = _UNKNOWN  # over the clients
    conflicts: float = nan  # share of a round's clients in conflict with the step; NaN for bounds
    seconds: float = nan  # of all rounds of a run, with their evaluations
    not_finite: int = 0  # repetitions whose numbers are not finite, and left out
    without_value: int = 0  # clients that other rows count, without a value in one repetition at least
    numbers: Mapping[str, Mapping[Repetition, float]] = field(default_factory=dict)  # by name, of each repetition


def summaries(
    methods: Sequence[Method], metric: str, stage: Stage, mode: Mode, reference: str | None = None
) -> list[MethodSummary]:
    """One row per method.

    A metric's values are those of the clients' own models, where they have any. The reference, by default the first
    method, is what the others are compared with.
    """
    named = {method.label: (method, method.own(metric, stage)) for method in methods}
    numbers = {label: method.numbers(name, stage, mode) for label, (method, name) in named.items()}
    base = numbers.get(next(iter(named), "") if reference is None else reference, {})
    counted = {label: _with_value(method, name, stage) for label, (method, name) in named.items()}
    everyone = set[int]().union(*(clients for several in counted.values() for clients in several))
    rows = []
    for label, (method, name) in named.items():
        estimates = {
            key: Estimate.of(
                found.values(), mark(found, base.get(key, {}), mode == "max" and key not in ("angle", "std"))
            )
            for key, found in numbers[label].items()
            if key in ("mean", "worst_10", "worst", "angle", "std")
        }
        who, several = method.worst_client(name, stage, mode), counted[label]
        row = MethodSummary(
            method=label,
            bound=method.first.method if method.is_bound else "",
            learning_rate=method.first.learning_rate,
            repetitions=len(method.fits),
            worst_client="" if who is None else method.first.client_names[who],
            conflicts=method.conflicts,
            seconds=method.seconds,
            not_finite=len(method.fits) - len(numbers[label].get("mean", ())),
            without_value=len(everyone - several[0].intersection(*several)) if several else 0,
            numbers=numbers[label],
            **estimates,
        )
        rows.append(row)
    return rows


def _with_value(method: Method, metric: str, stage: Stage) -> list[set[int]]:
    """The clients with a value, of each fit in which some have one."""
    found = ({c for c, value in values.items() if isfinite(value)} for values in method.ends(metric, stage).values())
    return [clients for clients in found if clients]


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
    """The numbers of the first metric, and the section that shows them."""

    metric: str
    mode: Mode
    rows: Sequence[MethodSummary]
    part: Part


def comparison(methods: Sequence[Method], stage: Stage) -> Summary | None:
    """One row per method, of the first metric."""
    metrics = metrics_of(records_of(methods), stage)
    if not metrics:
        return None
    metric, mode = next(iter(metrics.items()))
    rows = summaries(methods, metric, stage, mode)
    several = max(row.repetitions for row in rows) > 1
    bounds = " and ".join(row.method for row in rows if row.bound)
    having = " and ".join(method.label for method in methods if method.own(metric, stage) != metric)
    caption = sentences(
        f"{metric} in the {STAGES[stage]}. Worst client: whose value is worst. Conflicts: share of a round's clients "
        "whose update the step went against. Time: training, server and evaluation of all rounds.",
        "The worst client is one over all seeds. The worst 10 % are those of each seed, and can lie below." * several,
        f"Clients have models of their own with {having}: the values of these count everywhere." * bool(having),
        f"+ and -: better and worse than {rows[0].method}: the 95 % interval of the differences, seed by seed, leaves "
        "out zero." * (several and len(rows) > 1),
        f"No methods, but plain training to measure them by: {bounds}." * bool(bounds),
    )
    return Summary(metric, mode, rows, Part("In numbers", [summary_table(rows)], caption, level=3))


def summary_table(rows: Sequence[MethodSummary]) -> Table:
    """What describes how each method serves the clients, and what it cost."""
    uneven = ("angle", "angle (rad)") if any(isfinite(row.angle.mean) for row in rows) else ("std", "deviation")
    columns = {"mean": "mean", "worst_10": "worst 10 %", "worst": "worst client", uneven[0]: uneven[1]}
    forms = {key: notation([getattr(row, key).mean for row in rows]) for key in columns}
    cells = [
        [
            row.method,
            "-" if row.learning_rate is None else f"{row.learning_rate:g}",
            *(_estimated(getattr(row, key), form, row.worst_client * (key == "worst")) for key, form in forms.items()),
            "-" if isnan(row.conflicts) else percent(row.conflicts),
            "-" if isnan(row.seconds) else duration(row.seconds),
        ]
        for row in rows
    ]
    return Table(cells, "numbers", ["method", "lr", *columns.values(), "conflicts", "time"])


def _estimated(estimate: Estimate, form: str, who: str) -> str:
    return " ".join(filter(None, [spread(estimate, form, "±"), estimate.mark, f"({who})" * bool(who)]))


def clients(methods: Sequence[Method], stage: Stage) -> Part:
    """Every client's last value under each method, the worst under the first method on top."""
    found = []
    for metric, _, names in shown_metrics(methods, stage):
        found_by = [method.clients(name, stage) for method, name in zip(methods, names, strict=True)]
        order = next((column for column in found_by if column), [])
        values = [{(p.client_id, p.label): p.value for p in column} for column in found_by]
        form = notation([value for column in values for value in column.values()])
        rows = [
            [one.label, f"{one.trained:,}", f"{one.size:,}",
             *(number(column.get((one.client_id, one.label)), form) for column in values)]
            for one in (order[k] for k in both_ends(len(order), _LISTED))
        ]  # fmt: skip
        head = ["client", "training samples", f"{STAGES[stage]} samples", *(method.label for method in methods)]
        note = f" (the worst and best of {len(order):,})" if len(rows) < len(order) else ""
        found.append(Table(rows, "numbers", head, f"{metric} of {plural(len(rows), 'client')}{note}"))
    return Part("Numbers of all clients", found)


def reasons(methods: Sequence[Method]) -> Part:
    """Why clients were left out."""
    rows = []
    for method, record in [(each, record) for each in methods for record in each.records]:
        label = method.label if len(method.fits) == 1 else f"{method.label}, seed {record.seed}"
        for entry in record.absences:
            first, last = entry.first_round + 1, entry.last_round + 1
            names = ", ".join(label_of(record, client) for client in entry.client_ids[:5])
            more = " and others" if len(entry.client_ids) > 5 else ""
            rounds = f"{first}" if first == last else f"{first} to {last}"
            rows.append([label, entry.reason, f"{entry.count:,}", rounds, names + more])
    head = ["method", "reason", "times", "rounds", "clients"]
    count = sum(len(record.rounds) for record in records_of(methods))
    words = f"Every client that was drawn took part, in all of {plural(count, 'round')}." * bool(count and not rows)
    return Part("Who was missing", [Table(rows, "text", head)] if rows else [], words)


def costs(methods: Sequence[Method]) -> Part:
    """Seconds of each method, by what they were spent on, and the most bytes that fits take, by what they are for."""
    rows = []
    for method in methods:
        fits = [seconds_of(record) for record in method.records if len(record.rounds)]
        means = [fmean(fit[part] for fit in fits) for part in SPENT] if fits else []
        rows += [[method.label, *map(duration, means), duration(sum(means))]] if fits else []
    found = [Table(rows, "numbers", ["seconds of a fit", *SPENT, "in all"])] if rows else []
    memory = {method.label: method.first.memory for method in methods if method.first.memory}
    uses = list(dict.fromkeys(use for sizes in memory.values() for use in sizes))
    rows = [[use, *(in_bytes(sizes.get(use, 0)) for sizes in memory.values())] for use in uses]
    rows.append(["in all", *(in_bytes(sum(sizes.values())) for sizes in memory.values())])
    found += [Table(rows, "numbers", ["memory beside the module, at most", *memory])] if memory else []
    return Part("Time and memory", found)


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
