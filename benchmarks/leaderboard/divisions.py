# SPDX-License-Identifier: Apache-2.0
"""Some methods of a suite on further divisions of its data, beside what each client reaches alone.

A suite has one division, and its ± is that of first weights. Here the data are divided anew, with the learning rates
that the suite has picked. Runs on the suite's own division are taken from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fl_lightning as fl
from benchmarks.leaderboard.methods import REFERENCE, UNIFORM
from benchmarks.leaderboard.records import failed, finished
from benchmarks.leaderboard.standing import ACCURACY, Standing, seconds_of_run
from benchmarks.leaderboard.suites import TUNING_SEEDS, Suite
from fl_lightning.comparison.plan import Plan, Run
from fl_lightning.comparison.project import ObjectProject
from fl_lightning.comparison.runner import Runner
from fl_lightning.core.errors import ClientError
from fl_lightning.report import FitRecord
from fl_lightning.report.conclusion import LOCAL
from fl_lightning.report.tables import MethodSummary

METHODS = (REFERENCE, UNIFORM, "AFL", "FedFV", "FedMDFG", "FedLF")
ALONE = ("Ditto, lambda 0", REFERENCE)
"""Whose learning rate a client has alone, the first of these that the suite has; a lower one if training diverges."""
DIVISIONS, SEEDS = 3, 1


class Divisions:
    """The runs of a suite on several divisions.

    Args:
        suite: which.
        out: folder of the results of all suites.
        seeds: how many on each division.
    """

    def __init__(self, suite: Suite, out: Path, seeds: int = SEEDS) -> None:
        self.suite, self.folder = suite, out / f"{suite.name}-divisions"
        self._suite = Standing(suite, finished(out / suite.name), {})
        self._finished, self._failed = finished(self.folder), failed(self.folder)
        names = tuple(name for name in METHODS if name in self._suite.picked)
        self.plan = Plan((*names, LOCAL), suite.rates, tuple(range(seeds)), TUNING_SEEDS, DIVISIONS)

    def runs(self) -> Iterator[Run]:
        """All of them, a division after the other; clients alone, who take longest, come last."""
        picked, alone = self._suite.picked, self._rate_alone()
        rates = {name: picked.get(name, alone) for name in self.plan.methods}
        for names in (self.plan.methods[:-1], (LOCAL,)):
            for division, seed in self.plan.repetitions:
                yield from (Run(name, rates[name], seed, division) for name in names)

    def _rate_alone(self) -> float | None:
        """The highest rate, from that of ``ALONE`` down, at which no client's training has diverged."""
        first = next((self._suite.picked[name] for name in ALONE if name in self._suite.picked), None)
        if first is None:
            return None
        diverged = {key for key, why in self._failed.items() if ClientError.__name__ in why}
        keys = {
            rate: {Run(LOCAL, rate, seed, division).key for division, seed in self.plan.repetitions}
            for rate in self.suite.rates
            if rate <= first
        }
        return max((rate for rate, own in keys.items() if not own & diverged), default=first)

    @property
    def results(self) -> dict[Run, FitRecord]:
        """What the finished runs have left."""
        found = {**self._suite.finished, **self._finished}
        return {run: found[run.key] for run in self.runs() if run.key in found}

    def comparison(self) -> fl.Comparison | None:
        """Of the methods that have run on all divisions; ``None`` if the reference is none of them.

        A suite that has several divisions of its own has them in its own table.
        """
        results, runs = self.results, list(self.runs())
        whole = [name for name in self.plan.methods if all(run in results for run in runs if run.method == name)]
        if REFERENCE not in whole or self.suite.divisions > 1:
            return None
        plan = replace(self.plan, methods=tuple(whole))
        return fl.Comparison(plan, {run: one for run, one in results.items() if run.method in whole}, {}, ACCURACY)

    @property
    def alone(self) -> MethodSummary | None:
        """What clients reach alone, on the divisions where that has run; ``None``: on none."""
        results = {run: record for run, record in self.results.items() if run.method == LOCAL}
        divisions = len({run.division for run in results})
        if not divisions:
            return None
        plan = replace(self.plan, methods=(LOCAL,), divisions=divisions)
        return fl.Comparison(plan, results, {}, ACCURACY).rows[0]

    def carry_out(self, root: Path) -> None:
        """Does what is not done yet.

        Args:
            root: folder of the data sets.
        """
        project = ObjectProject(self.suite.learner, self.suite.federate(root), self.suite.trainer)
        strategies, done = self.suite.methods(), self.results
        runner = Runner(project, strategies, strategies[REFERENCE], self.folder, 60.0)
        while left := next((run for run in self.runs() if run not in done), None):
            try:
                runner.carry_out(left)
            except ClientError as error:
                if left.method != LOCAL or left.learning_rate == min(self.suite.rates):
                    raise
                print(f"{self.suite.name}: {left}: {error}; once more with a lower rate", flush=True)
                self._failed = failed(self.folder)
            if record := runner.finished(left):
                self._finished[left.key] = done[left] = record
                print(f"{self.suite.name}: {left}, {seconds_of_run(record):.0f} s", flush=True)

    def page(self) -> str:
        """The table and what it comes to, in Markdown; empty as long as the reference has not run on all divisions."""
        found = self.comparison()
        if found is None:
            return ""
        results = self.results
        missing = [str(run) for run in self.runs() if run not in results]
        parts = [
            f"# {self.suite.title}: {DIVISIONS} divisions",
            f"`python -m benchmarks.leaderboard divisions {self.suite.name} --data-root DIR`",
            f"{self.suite.telling[0].upper()}{self.suite.telling[1:]}. {self.suite.rounds} rounds; learning rates are "
            f"those of [the suite]({self.suite.name}.md).",
            found.table,
            "`+` and `-`: better and worse than FedAvg; the 95 % interval (Student's t over the divisions) of the "
            "differences, taken run by run, leaves out zero.",
            f"Not run yet: {'; '.join(missing)}." if missing else "",
        ]
        return "\n\n".join(part for part in parts if part) + "\n"
