# SPDX-License-Identifier: Apache-2.0
"""The table that a comparison prints, in Markdown, and the sentences below it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from fl_lightning.arguments import listed
from fl_lightning.comparison.plan import Measure, Plan, Run
from fl_lightning.report.number_formats import STAGES, plural, shortened
from fl_lightning.report.tables import MethodSummary, Part, Table

WIDTH = 120
_LONGEST, _NAMED = 40, 5
_WORDS = {"mean": "the mean over the clients", "worst_10": "the mean over the worst tenth of the clients"}


def markdown(table: Table) -> str:
    """A table in Markdown; long names are cut short."""
    # A bar would end the cell.
    cells = [[shortened(cell.replace("|", "/"), _LONGEST) for cell in row] for row in (table.head, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = [cells[0], ["-" * width for width in widths], *cells[1:]]
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)


def section(part: Part, everything: bool) -> str:
    """A section in Markdown; without everything, only with the tables that are open on a page."""
    found = [filled(f"{part.title} {part.caption}")] * bool(part)
    for table in part.tables:
        found += [table.words, *[markdown(table)] * (everything or table.opened)]
    return "\n\n".join(found)


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
            f"at the end of the fit, on average over {plural(len(plan.picking), 'run')}"
            + (f", the first of {len(plan.repetitions)}: the others have run with it alone." if plan.others else ".")
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
