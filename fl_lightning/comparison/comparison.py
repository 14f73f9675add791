# SPDX-License-Identifier: Apache-2.0
"""What a comparison found."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_lightning.arguments import TEXT, checked
from fl_lightning.comparison.plan import Measure, Plan, Run, picked_rates
from fl_lightning.comparison.table import filled, markdown, notes, section
from fl_lightning.core.storage.files import write_text
from fl_lightning.lightning.names import rank_zero_warn
from fl_lightning.report import FitRecord, write_report
from fl_lightning.report.conclusion import conclude
from fl_lightning.report.gains import Gain, by_client, gain_tables, joining
from fl_lightning.report.runs_of_a_method import by_method
from fl_lightning.report.tables import MethodSummary, summaries, summary_table

FILES = ("table.md", "runs.csv", "report.html")
"""What a comparison writes."""


@checked(failures=TEXT)
@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison and what they say; ``print`` shows the table and the conclusion.

    Attributes:
        plan: all runs.
        results: what each finished run has left.
        failures: why the others came to nothing.
        measure: which of the clients' values count.

    Raises:
        ValueError: runs on one division are not of the same clients.
    """

    plan: Plan
    results: Mapping[Run, FitRecord]
    failures: Mapping[Run, str]
    measure: Measure

    def __post_init__(self) -> None:
        firsts: dict[int, Run] = {}
        for run, record in self.results.items():
            first = firsts.setdefault(run.division, run)
            if _trained(record) != _trained(self.results[first]):
                raise ValueError(
                    f"all runs must have the same clients, found others in ({run}) than in ({first}): the data has "
                    "changed, take another folder"
                )

    @cached_property
    def learning_rates(self) -> Mapping[str, float | None]:
        """The learning rate that was picked for each method."""
        return picked_rates(self.plan, self.results, self.measure)

    @cached_property
    def rows(self) -> list[MethodSummary]:
        """The numbers of the table."""
        return self._summed(self.records)

    @cached_property
    def table(self) -> str:
        """The table, in Markdown."""
        return markdown(summary_table(self.rows))

    @cached_property
    def conclusion(self) -> str:
        """What the table comes to, in words; empty where there is nothing to compare."""
        return "\n".join(map(filled, conclude(self.rows, self.measure.metric, self.measure.mode)))

    @cached_property
    def gains(self) -> dict[str, list[Gain]]:
        """By method, what each client gains over training alone; empty without the bound ``"local only"``."""
        found = self.measure
        return gain_tables(by_method(self.records), found.metric, found.reported_on, found.mode)

    def __str__(self) -> str:
        return self._text(everything=False)

    def _text(self, everything: bool) -> str:
        said = "\n".join(notes(self.plan, self.rows, self.measure, self.failures, self._never_measured))
        joined = section(joining(self.gains, self.measure.metric), everything)
        return "\n\n".join(part for part in (self.table, said, self.conclusion, joined) if part)

    @property
    def _never_measured(self) -> list[str]:
        """Clients without a value in any run."""
        found, measured = self.measure, dict[str, bool]()
        for method in by_method(self.records):
            name = method.own(found.metric, found.reported_on)
            for client, values in by_client(method, name, found.reported_on).items():
                measured[client] = measured.get(client, False) or bool(values)
        return [client for client, any_value in measured.items() if not any_value]

    @property
    def records(self) -> list[FitRecord]:
        """The records of the runs in the table, for :func:`fl_lightning.report.write_report`."""
        runs = [
            run for method, rate in self.learning_rates.items() for run in self.plan.of_method(method, rate).values()
        ]
        return [self.results[run] for run in runs if run in self.results]

    @checked()
    def write(self, folder: str | Path) -> list[Path]:
        """Writes ``table.md``, ``runs.csv`` and ``report.html``.

        The report needs plotly, which the extra ``report`` brings; it is left out where that is missing.

        Args:
            folder: where to; it is made if it is missing.

        Returns:
            What was written.
        """
        table, runs, report = (Path(folder) / name for name in FILES)
        write_text(table, f"{self._text(everything=True)}\n")
        rows = [self._run_row(run) for run in self.plan.runs(self.learning_rates)]
        file = io.StringIO()
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:  # NaN is not itself
            writer.writerow({name: "" if value is None or value != value else value for name, value in row.items()})
        write_text(runs, file.getvalue())
        try:
            return [table, runs, write_report(self.records, report)]
        except ImportError as missing:
            rank_zero_warn(f"{FILES[-1]} is left out: {missing}")
            return [table, runs]

    def _summed(self, records: list[FitRecord]) -> list[MethodSummary]:
        found = self.measure
        return summaries(by_method(records), found.metric, found.reported_on, found.mode, self.plan.methods[0])

    def _run_row(self, run: Run) -> dict[str, Any]:
        """A run, those that failed as well."""
        record, found = self.results.get(run), self.measure
        row = picked = MethodSummary("")
        if record is not None:
            (row,) = self._summed([record])
            (picked,) = summaries(by_method([record]), found.picked_by, "val", found.mode)
        is_picked = run.method in self.learning_rates and self.learning_rates[run.method] == run.learning_rate
        return {
            "method": run.method, "learning_rate": run.learning_rate, "division": run.division, "seed": run.seed,
            "picked": int(is_picked), "status": "failed" if record is None else "finished",
            "val_mean": picked.mean.mean, "val_worst_10": picked.worst_10.mean, "mean": row.mean.mean,
            "worst_10": row.worst_10.mean, "worst_client": row.worst_client, "worst": row.worst.mean,
            "angle": row.angle.mean, "conflicts": row.conflicts, "seconds": row.seconds,
            "error": self.failures.get(run, ""),
        }  # fmt: skip


def _trained(record: FitRecord) -> dict[str, int]:
    return {name: size for name, size in zip(record.client_names, record.client_sizes, strict=True) if size}
