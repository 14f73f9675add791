# SPDX-License-Identifier: Apache-2.0
"""Carries a comparison out: the runs that are left, and then what all of them say."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fl_lightning.arguments import check_unused
from fl_lightning.comparison.comparison import Comparison
from fl_lightning.comparison.files import check_configuration, owned
from fl_lightning.comparison.plan import BOUNDS, Bounding, Measure, Plan, Rule, Run, measure_of, picked_rates, seed_list
from fl_lightning.comparison.pool import work
from fl_lightning.comparison.project import Project, described_each
from fl_lightning.comparison.runner import Runner
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.report import FitRecord
from fl_lightning.report.number_formats import duration, plural
from fl_lightning.report.runs_of_a_method import by_method
from fl_lightning.report.tables import summaries

_NO_MATTER = ("seed", "executor", "timeout", "log_client_names")
"""Arguments of a strategy that are replaced, or change no result."""


@dataclass(frozen=True)
class Session:
    """A comparison to carry out or to go on with; its options are those of :func:`fl_lightning.compare`."""

    project: Project
    methods: Mapping[str, FederatedStrategy]
    base: FederatedStrategy  # says how the clients of the bounds train
    folder: Path
    learning_rates: Sequence[float | None]
    seeds: int | Sequence[int]
    bounds: Bounding = "both"
    metric: str | None = None
    select: Rule = "mean"
    jobs: int = 1
    save_seconds: float = 60.0
    tuning_seeds: int | None = None
    divisions: int = 1

    def __post_init__(self) -> None:
        for name, strategy in self.methods.items():
            if strategy.arguments.get("partition") is not None:
                raise ValueError(f"partition of {name} must be left out: FederatedDataModule divides the data of all")
        if len(self.plan.learning_rates) == 1:
            why = "where there is one learning rate, and none to pick"
            check_unused("tuning_seeds", self.tuning_seeds, None, why)
            check_unused("select", self.select, "mean", why)

    @cached_property
    def plan(self) -> Plan:
        """All runs."""
        methods, rates = (*self.methods, *BOUNDS[self.bounds]), tuple(self.learning_rates)
        return Plan(methods, rates, seed_list(self.seeds), self.tuning_seeds, self.divisions)

    @cached_property
    def runner(self) -> Runner:
        """Carries out single runs."""
        return Runner(self.project, self.methods, self.base, self.folder, self.save_seconds)

    def configuration(self) -> dict[str, Mapping[str, Any]]:
        """Whatever changes results, by name, of the project and of each method."""
        parts = {**self.methods, **({"the bounds": self.base} if BOUNDS[self.bounds] else {})}
        given = {name: {k: v for k, v in s.arguments.items() if k not in _NO_MATTER} for name, s in parts.items()}
        own = {name: described_each("", arguments) for name, arguments in given.items()}
        return {"the project": self.project.configuration(), **own}

    def carry_out(self) -> Comparison:
        """Says how many runs there are, does what is not done yet, and writes the tables.

        Refuses a folder with runs of another configuration or of other data, or in which another command is at work.
        Raises RuntimeError if every run failed.
        """
        with owned(self.folder):
            check_configuration(self.folder, self.configuration())
            plan = self.plan
            results = self._finished(plan.grid())
            if plan.divisions > 1 and not any(run.division for run in results):
                self.runner.check_divisions(next(plan.grid()))
            # What would be picked now; runs that are left may change it.
            picked = picked_rates(plan, results, self._measure(results.values())) if results else {}
            ahead = len(plan) - len(self._finished(plan.runs(picked)))
            _say(f"{self._sizes()} = {len(plan)} runs, of which {len(plan) - ahead} are finished")
            failures = self._run(plan.grid(), ahead)
            results = self._finished(plan.grid())
            if not results:
                raise RuntimeError(f"all {len(plan)} runs failed, the first with {next(iter(failures.values()))}")
            measure = self._measure(results.values())
            picked = picked_rates(plan, results, measure)
            failures |= self._run(plan.further(picked))
            comparison = Comparison(plan, self._finished(plan.runs(picked)), failures, measure)
            comparison.write(self.folder)
            return comparison

    def _finished(self, runs: Iterable[Run]) -> dict[Run, FitRecord]:
        return {run: record for run in runs if (record := self.runner.finished(run)) is not None}

    def _measure(self, records: Iterable[FitRecord]) -> Measure:
        several = len(self.plan.learning_rates) > 1
        return measure_of(next(iter(records)), several, self.metric, self.select)

    def _sizes(self) -> str:
        plan = self.plan
        word = "seed" if plan.divisions == 1 else "repetition"
        each = f"{plural(len(plan.learning_rates), 'learning rate')} x {plural(len(plan.picking), word)}"
        if plan.others:
            each = f"({each}, {plural(len(plan.others), word)} more with the picked one)"
        return f"{plural(len(plan.methods), 'method')} x {each}"

    def _run(self, runs: Iterable[Run], ahead: int | None = None) -> dict[Run, str]:
        """Carries out what is left of some runs, with a line for each; ``ahead`` counts those that come later, too."""
        left = [run for run in runs if self.runner.finished(run) is None]
        ahead = len(left) if ahead is None else ahead
        failures, began, places = dict[Run, str](), time.perf_counter(), iter(range(1, len(left) + 1))

        def done(run: Run, error: str) -> None:
            record, place = self.runner.finished(run), next(places)
            if record is None:
                failures[run], words = error, f"failed, {error}"
            else:
                measure = self._measure([record])
                (row,) = summaries(by_method([record]), measure.metric, measure.reported_on, measure.mode)
                words = f"{measure.metric} mean {row.mean.mean:.3f}, worst 10 % {row.worst_10.mean:.3f}"
                words += f" ({duration(row.seconds)})"
            rest = (time.perf_counter() - began) / place * (ahead - place)
            still = f"; about {duration(rest)} left" if ahead > place else ""
            _say(f"[{len(self.plan) - ahead + place}/{len(self.plan)}] {run}: {words}{still}")

        work({run: partial(self.runner.carry_out, run) for run in left}, self.jobs, done)
        return failures


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
