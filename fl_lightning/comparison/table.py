# SPDX-License-Identifier: Apache-2.0
"""The table that a comparison prints, in Markdown, and the sentences below it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from math import isnan

from fl_lightning.arguments.kinds import listed
from fl_lightning.comparison.plan import Measure, Plan, Run
from fl_lightning.report.conclusion import LOCAL, POOLED
from fl_lightning.report.gains import Gain, counted, gain_cells
from fl_lightning.report.number_formats import STAGES, notation, percent, plural, shortened, spread
from fl_lightning.report.repetitions import division_share
from fl_lightning.report.tables import Estimate, MethodSummary

WIDTH = 120
_SHORTEST, _LONGEST = 8, 40
_PRINTED, _NAMED = 15, 5
_WORDS = {"mean": "the mean over the clients", "worst_10": "the mean over the worst tenth of the clients"}


def table_text(rows: Sequence[MethodSummary], width: int | None = WIDTH) -> str:
    """The table; long names are cut short where a line would have more than ``width`` characters."""
    names, clients = max(len(row.method) for row in rows), max(len(row.worst_client) for row in rows)
    while True:
        lines = _lines(rows, names, clients)
        if width is None or len(lines[0]) <= width or max(names, clients) <= _SHORTEST:
            return "\n".join(lines)
        if names >= clients:
            names -= 1
        else:
            clients -= 1


def gains_text(gains: Mapping[str, Sequence[Gain]], metric: str, everything: bool = True) -> str:
    """Whether clients should join: a sentence per method, and tables with a row per client.

    Without everything, there is one table, of the method with the fewest clients that are worse off, and none of more
    than 15 clients.
    """
    if not gains:
        return ""
    head = f"Should a client join? The gain in {metric} over training alone, with its 95 % interval:"
    sentences = [head, *(f"{method}: {counted(each)}.{_worse_off(each)}" for method, each in gains.items())]
    shown = gains if everything else dict([min(gains.items(), key=_left_behind)])
    tables = [_gain_table(method, each) for method, each in shown.items() if everything or len(each) <= _PRINTED]
    return "\n\n".join(["\n".join(map(filled, sentences)), *tables])


def _gain_table(method: str, gains: Sequence[Gain]) -> str:
    cells = [[_short(cell, _LONGEST) for cell in gain_cells(gain)] for gain in gains]
    head = ("client", "alone", f"with {_short(method, _LONGEST)}", "gain", "the client is")
    return "\n".join(_padded(head, cells))


def _left_behind(entry: tuple[str, Sequence[Gain]]) -> tuple[int, int]:
    advice = [gain.advice for gain in entry[1]]
    return advice.count("worse off"), -advice.count("better off")


def _worse_off(gains: Sequence[Gain]) -> str:
    worse = [gain.client for gain in gains if gain.advice == "worse off"]
    return f" Worse off: {listed(worse, 'and')}." if 0 < len(worse) <= _NAMED else ""


def _lines(rows: Sequence[MethodSummary], names: int, clients: int) -> list[str]:
    angles = any(row.angle.spread is not None for row in rows)
    columns = ("mean", "worst_10", "worst", "angle")
    form = {column: notation([getattr(row, column).mean for row in rows]) for column in columns}
    shares = [[division_share(row.numbers.get(key, {})) for key in ("mean", "worst_10")] for row in rows]
    split = any(share is not None for both in shares for share in both)
    head = ["method", "lr", "mean", "worst 10 %", *["by division"] * split, "worst client", *["angle"] * angles]
    head += ["conflicts", "seconds"]
    cells = [
        [
            _short(row.method, names),
            "-" if row.learning_rate is None else f"{row.learning_rate:g}",
            _cell(row.mean, form["mean"]),
            _cell(row.worst_10, form["worst_10"]),
            *[", ".join("-" if share is None else f"{share:.0%}".replace("%", " %") for share in both)] * split,
            (f"{_short(row.worst_client, clients)} " if row.worst_client else "") + _cell(row.worst, form["worst"]),
            *[_cell(row.angle, form["angle"])] * angles,
            "-" if isnan(row.conflicts) else percent(row.conflicts),
            "-" if isnan(row.seconds) else f"{row.seconds:.1f}" if row.seconds < 99.95 else f"{row.seconds:.0f}",
        ]
        for row, both in zip(rows, shares, strict=True)
    ]
    return _padded(head, cells, last_right=True)  # seconds; marks end some of the other cells


def _padded(head: Sequence[str], cells: Sequence[Sequence[str]], last_right: bool = False) -> list[str]:
    """The lines of a table in Markdown."""
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    rule = ["-" * width for width in widths]
    rule[-1] = f"{rule[-1][1:]}:" if last_right else rule[-1]
    rows = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, rule, *cells)]
    ends = [row[-1].strip().rjust(widths[-1]) if last_right else row[-1] for row in rows]
    return [f"| {' | '.join([*row[:-1], end])} |" for row, end in zip(rows, ends, strict=True)]


def _cell(estimate: Estimate, form: str) -> str:
    return f"{spread(estimate.spread, form, '±')} {estimate.mark}".rstrip()


def _short(name: str, width: int) -> str:
    return shortened(name.replace("|", "/"), width)  # a bar would end the cell


def notes(
    plan: Plan, rows: Sequence[MethodSummary], measure: Measure, failures: Mapping[Run, str], unmeasured: list[str]
) -> list[str]:
    """What one has to know to read the table, a paragraph each."""
    units = "seeds" if plan.divisions == 1 else "divisions"
    repeated = plural(len(plan.seeds), "seed")
    repeated = repeated if plan.divisions == 1 else f"{plan.divisions} divisions of the data with {repeated} each"
    found = [f"Numbers: {measure.metric} of the clients on {STAGES[measure.reported_on]} data, at the end of the fit."]
    if measure.selected_on is not None:
        found.append(
            f"Learning rates: of {', '.join(f'{rate:g}' for rate in plan.learning_rates)}, each method has the one "
            f"that is best by {_WORDS[measure.select]} of {measure.picked_by} on {STAGES[measure.selected_on]} data "
            f"at the end of the fit, {_picking(plan, repeated)}."
        )
        if measure.selected_on == measure.reported_on:
            found[-1] += (
                " The data have no test split: learning rates are picked and reported on the same data, and the "
                "numbers flatter all methods."
            )
    if len(plan.repetitions) < 2:
        found.append("One seed says nothing about chance: deviations and marks need two or more.")
    else:
        found.append(
            f"±: standard deviation over {repeated}. + and -: better and worse than {plan.methods[0]}; the 95 % "
            f"interval (Student's t over the {units}) of the differences, taken run by run, leaves out zero."
            + " Another division of the data may say something else: see divisions."
            * (plan.divisions == 1)
        )
    if plan.divisions > 1 and len(plan.seeds) > 1:
        found.append("By division: the division's share of the variance behind ± of the mean and of the worst 10 %.")
    if any(row.angle.spread is not None for row in rows):
        found.append("Angle: fairness angle in radians, 0 if all clients have the same value.")
    found.append(
        "Conflicts: share of a round's clients that the step works against. Seconds: of one run, evaluations included."
    )
    words = {LOCAL: "each client trains alone on its own data", POOLED: "one model is trained on all clients' data"}
    bounds = [f"{row.method}: {words[row.bound]}" for row in rows if row.bound]
    found += [f"Bounds: {'; '.join(bounds)}."] * bool(bounds)
    found += _edges(plan, rows)
    for row in rows:
        if row.repetitions < len(plan.repetitions):
            found.append(f"{row.method} has {row.repetitions} of {repeated}: the others failed.")
        if row.not_finite:
            found.append(
                f"{row.method} ends with values of clients that are not finite in {row.not_finite} of "
                f"{row.repetitions} runs, which are left out of its numbers."
            )
        if row.without_value:
            found.append(
                f"{row.method} leaves out {plural(row.without_value, 'client')} that other rows count, in one run or "
                "more: a client that never trained has no model of its own, and a metric may be undefined."
            )
    if unmeasured:
        some = listed(unmeasured, "and") if len(unmeasured) <= _NAMED else plural(len(unmeasured), "client")
        found.append(f"No run has a {measure.metric} of {some}: such clients count in no number of the table.")
    missing = [method for method in plan.methods if method not in {row.method for row in rows}]
    found += [f"No run of {', '.join(missing)} came to its end."] * bool(missing)
    found += [f"{len(failures)} of {len(plan)} runs failed:"] * bool(failures)
    found += [f"  {run}: {' '.join(error.split())}" for run, error in failures.items()]
    return [filled(text) for text in found]


def filled(text: str) -> str:
    """A paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


def _edges(plan: Plan, rows: Sequence[MethodSummary]) -> list[str]:
    """A hint at methods whose learning rate is the smallest or largest of those given."""
    rates = sorted(rate for rate in plan.learning_rates if rate is not None)
    ends = ((rates[0], "smallest", "smaller"), (rates[-1], "largest", "larger")) if len(rates) > 1 else ()
    found = []
    for rate, word, further in ends:
        methods = ", ".join(row.method for row in rows if row.learning_rate == rate)
        if methods:
            found.append(
                f"The {word} learning rate, {rate:g}, was picked for {methods}: a {further} one may be better."
            )
    return found


def _picking(plan: Plan, repeated: str) -> str:
    if not plan.others:
        return f"on average over {repeated}"
    seeds, base = ", ".join(str(one.seed) for one in plan.picking), " on the first division" * (plan.divisions > 1)
    how = f"with seed {seeds}{base} alone" if len(plan.picking) == 1 else f"on average over the seeds {seeds}{base}"
    return f"{how}; all else has run with it and with no other"
