# SPDX-License-Identifier: Apache-2.0
"""The short tables on pages of the documentation: chosen columns, with the published figures in brackets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import isnan
from pathlib import Path
from statistics import fmean

from benchmarks.papers import ledger
from benchmarks.papers.catalog import experiment
from benchmarks.papers.experiment import Case, Experiment
from benchmarks.papers.report import Results, final, gather, rewritten

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Place:
    """A table on a page, between two comments with its name.

    Attributes:
        page: a file of docs.
        name: of the experiment.
        groups: of cases, side by side.
        metrics: of each group.
        rows: what a case's label must end with; all cases of the groups that have figures, if there is nothing.
        published: rows without published figures are left out.
    """

    page: str
    name: str
    groups: tuple[str, ...]
    metrics: tuple[str, ...]
    rows: tuple[str, ...] = ("",)
    published: bool = False

    @property
    def experiment(self) -> Experiment:
        """Whose figures it shows."""
        return experiment(self.name)

    def text(self, out: Path) -> str:
        """The table in Markdown.

        Args:
            out: folder of the results.
        """
        found, results = self.experiment, gather(self.experiment, out)
        cases = {(case.group, case.label): case for case in found.cases if case.name in results and self._shows(case)}
        columns = list(product(self.groups, self.metrics))
        lines = [["method", *map(self._head, columns)]]
        for label in dict.fromkeys(label for group, label in cases if group in self.groups):
            row = [(cases.get((group, label)), metric) for group, metric in columns]
            lines.append(
                [label, *("" if case is None else _cell(found, case, results, metric) for case, metric in row)]
            )
        text = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([text[0], "|" + "---|" * len(lines[0]), *text[1:]])

    def _shows(self, case: Case) -> bool:
        return case.label.endswith(self.rows) and (bool(case.published) or not self.published)

    def _head(self, column: tuple[str, str]) -> str:
        group = column[0] if len(self.groups) > 1 else ""
        metric = column[1].removeprefix("per_round_").replace("_", " ") if len(self.metrics) > 1 else ""
        return ": ".join(part for part in (group, metric) if part)


def _cell(found: Experiment, case: Case | None, results: Results, metric: str) -> str:
    if case is None:
        return ""
    ours = fmean(final(lines, metric, found.last) for lines in results[case.name].values())
    target = case.published.get(metric)
    return "" if isnan(ours) else _number(ours) + ("" if target is None else f" ({_number(target)})")


def _number(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"


_ADULT = ("doctorates", "others", "disparity 1", "disparity 2")
_LAYERS = tuple(f"per_round_layer{number}" for number in range(1, 6))
_ATTACKS = ("false losses", "label flip", "ALIE", "inner products", "model replacement")
PLACES = (
    Place("evidence.md", "fedfv-table2", ("as recorded",), ("mean", "std", "worst_5")),
    Place("evidence.md", "fedfv-table3", ("as recorded",), ("mean", "std", "min")),
    Place("evidence.md", "fcfl-adult", ("code",), _ADULT, published=True),
    Place("evidence.md", "fedheal", ("MNIST and USPS", "Office-Caltech"), ("mean", "sample_std", "min")),
    Place("evidence_fedlf.md", "fedlf-table1", ("Dir(0.1)", "Pat-1", "Pat-2"), ("mean", "angle")),
    Place("evidence_fedlf.md", "fedlf-ablation", ("", "Neighbouring classes"), ("mean", "angle")),
    Place("evidence_fedlf.md", "fedlf-table2", ("",), ("mean", "per_round_conflicts", *_LAYERS)),
    Place(
        "attacks_results.md",
        "fedmdfg-attacks",
        tuple(dict.fromkeys(case.group for case in experiment("fedmdfg-attacks").cases)),
        ("mean",),
    ),
    Place(
        "attacks_results.md",
        "defences",
        ("clean", *(f"{attack}, 20%" for attack in _ATTACKS)),
        ("mean",),
        rows=("no guard", "clipped", "Multi-Krum"),
    ),
)


def write_pages(names: Sequence[str], out: Path, docs: Path = DOCS) -> None:
    """Writes the tables of some experiments into their pages.

    Args:
        names: of the experiments.
        out: folder of the results.
        docs: folder of the pages.
    """
    for place in PLACES:
        if place.name in names:
            page = docs / place.page
            text = rewritten(page.read_text(encoding="utf-8"), place.name, place.text(out))
            page.write_text(text, encoding="utf-8")


def write_ledger(out: Path) -> None:
    """Writes the ledger into the page that begins with it."""
    page = DOCS / "evidence.md"
    page.write_text(rewritten(page.read_text(encoding="utf-8"), "ledger", ledger.text(out)), encoding="utf-8")
