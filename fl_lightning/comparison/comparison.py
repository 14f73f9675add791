# SPDX-License-Identifier: Apache-2.0
"""What a comparison found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fl_lightning.arguments import TEXT, checked
from fl_lightning.comparison.files import clients_csv, runs_csv
from fl_lightning.comparison.fitted import Fitted, write_text
from fl_lightning.comparison.plan import Plan, Run
from fl_lightning.comparison.selection import Measure, chosen_rates
from fl_lightning.comparison.summary import MethodSummary, standings, summaries
from fl_lightning.comparison.table import filled, notes, table_text
from fl_lightning.lightning.names import rank_zero_warn
from fl_lightning.report import FitRecord, write_report
from fl_lightning.report.conclusion import conclude

FILES = ("table.md", "runs.csv", "clients.csv", "report.html")
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
    results: Mapping[Run, Fitted]
    failures: Mapping[Run, str]
    measure: Measure

    def __post_init__(self) -> None:
        clients = {run: _clients(fitted.record) for run, fitted in self.results.items()}
        firsts: dict[int, Run] = {}
        for run, found in clients.items():
            first = firsts.setdefault(run.division, run)
            if found != clients[first]:
                raise ValueError(
                    f"all runs must have the same clients, found others in ({run}) than in ({first}): the data has "
                    "changed, take another folder"
                )

    @cached_property
    def learning_rates(self) -> Mapping[str, float | None]:
        """The learning rate that was picked for each method."""
        return chosen_rates(self.plan, self.results, self.measure)

    @cached_property
    def rows(self) -> list[MethodSummary]:
        """The numbers of the table."""
        return summaries(self.plan, self.results, self.learning_rates, self.measure)

    @cached_property
    def table(self) -> str:
        """The table, in Markdown, at most 120 characters wide."""
        return table_text(self.rows)

    @cached_property
    def conclusion(self) -> str:
        """What the table comes to, in words, what matters most first; empty where there is nothing to compare."""
        rows = standings(self.plan, self.results, self.learning_rates, self.measure)
        return "\n".join(map(filled, conclude(rows, self.measure.metric, self.measure.mode).paragraphs()))

    def __str__(self) -> str:
        return "\n\n".join(part for part in (self.table, self._notes, self.conclusion) if part)

    @property
    def _notes(self) -> str:
        return "\n".join(notes(self.plan, self.rows, self.measure, self.failures))

    @property
    def records(self) -> list[FitRecord]:
        """The records of the runs in the table, for :func:`fl_lightning.report.write_report`."""
        runs = [
            run
            for method in self.plan.methods
            if method in self.learning_rates
            for run in self.plan.of_method(method, self.learning_rates[method]).values()
        ]
        return [self.results[run].record for run in runs if run in self.results]

    @checked()
    def write(self, folder: str | Path) -> list[Path]:
        """Writes ``table.md``, ``runs.csv``, ``clients.csv`` and ``report.html``.

        The report needs plotly, which the extra ``report`` brings; it is left out where that is missing.

        Args:
            folder: where to; it is made if it is missing.

        Returns:
            What was written.
        """
        folder = Path(folder)
        page = (self.conclusion, table_text(self.rows, width=None), self._notes)
        texts = (
            "\n\n".join(part for part in page if part) + "\n",
            runs_csv(self.plan, self.results, self.learning_rates, self.measure, self.failures),
            clients_csv(self.plan, self.results, self.learning_rates),
        )
        written = [folder / name for name in FILES[:-1]]
        for path, text in zip(written, texts, strict=True):
            write_text(path, text)
        try:
            written.append(write_report(self.records, folder / FILES[-1]))
        except ImportError as missing:
            rank_zero_warn(f"{FILES[-1]} is left out: {missing}")
        return written


def _clients(record: FitRecord) -> dict[str, int]:
    """The clients that train, and their samples."""
    return {name: size for name, size in zip(record.client_names, record.client_sizes, strict=True) if size}
