# SPDX-License-Identifier: Apache-2.0
"""Carries a comparison out: the cost first, then the runs that are left, then what they say."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fl_lightning.arguments import check_unused
from fl_lightning.comparison.comparison import Comparison
from fl_lightning.comparison.files import check_configuration, owned
from fl_lightning.comparison.plan import BOUNDS, Bounding, Measure, Plan, Rule, Run, chosen_rates, measure_of, seed_list
from fl_lightning.comparison.pool import Failure, work
from fl_lightning.comparison.project import Project, described_each
from fl_lightning.comparison.runner import Runner
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.report import FitRecord
from fl_lightning.report.conclusion import LOCAL
from fl_lightning.report.number_formats import duration, plural
from fl_lightning.report.runs_of_a_method import by_method, seconds_of
from fl_lightning.report.tables import summaries

_NO_MATTER = ("seed", "partition", "executor", "timeout", "log_client_names")
"""Arguments of a strategy that are replaced, belong to the project, or change no result."""


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
    test_metric: str | None = None
    select: Rule = "mean"
    jobs: int = 1
    save_seconds: float = 60.0
    tuning_seeds: int | None = None
    divisions: int = 1

    def __post_init__(self) -> None:
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

    def carry_out(self, only_cost: bool = False) -> Comparison | None:
        """Says what it will cost, does what is not done yet unless the cost alone is asked for, and writes the tables.

        Refuses a folder with runs of another configuration or of other data, or in which another command is at work.
        Raises RuntimeError if every run failed.
        """
        with owned(self.folder):
            check_configuration(self.folder, self.configuration())
            plan = self.plan
            results = self._finished(plan.grid())
            if plan.divisions > 1 and not any(run.division for run in results):
                self.runner.check_divisions(next(plan.grid()))
            grid = [run for run in plan.grid() if run not in results]
            # What would be picked now; runs that are left may change it.
            picked = chosen_rates(plan, results, self._measure(results.values())) if results else {}
            further = self._left(plan.further(picked))
            later = [run.method for run in further]
            later += [method for _ in plan.others for method in plan.methods if method not in picked]
            # Rates with which a run has ended come first: others may not train at all.
            timed = self._timed([*further, *grid], bool(results))
            seconds = {method: _seconds(record, method) for method, record in timed.items()}
            _say(self._cost(Counter([*(run.method for run in grid), *later]), timed, seconds))
            measure = self._measure([*timed.values(), *results.values()])
            if only_cost:
                return None
            failures = self._run(grid, later, seconds, measure)
            results = self._finished(plan.grid())
            if not results:
                raise RuntimeError(f"all {len(plan)} runs failed, the first with {next(iter(failures.values()))}")
            picked = chosen_rates(plan, results, measure)
            failures |= self._run(self._left(plan.further(picked)), [], seconds, measure)
            comparison = Comparison(plan, self._finished(plan.runs(picked)), failures, measure)
            comparison.write(self.folder)
            return comparison

    def _finished(self, runs: Iterable[Run]) -> dict[Run, FitRecord]:
        return {run: record for run in runs if (record := self.runner.finished(run)) is not None}

    def _left(self, runs: Iterable[Run]) -> list[Run]:
        return [run for run in runs if self.runner.finished(run) is None]

    def _measure(self, records: Iterable[FitRecord]) -> Measure:
        several = len(self.plan.learning_rates) > 1
        return measure_of(next(iter(records)), several, self.metric, self.test_metric, self.select)

    def _timed(self, left: list[Run], proven: bool) -> dict[str, FitRecord]:
        """A timed round of each method; one that has runs to do and was not timed before is timed."""
        failed = dict[str, str]()
        firsts = {run.method: run for run in reversed(left) if self.runner.timed(run.method) is None}
        tasks = {run: partial(self.runner.time, run) for method in self.plan.methods if (run := firsts.get(method))}
        if tasks:
            _say(f"Timing one round of {', '.join(run.method for run in tasks)} ...")

        def done(run: Run, found: Any) -> None:
            if isinstance(found, Failure):
                failed[run.method] = found.error
                _say(f"{run.method}: {found.error}")

        work(tasks, self.jobs, done)
        timed = {method: found for method in self.plan.methods if (found := self.runner.timed(method)) is not None}
        if failed and not timed and not proven:
            method, error = next(iter(failed.items()))
            raise RuntimeError(f"no method could train a round; {method} failed with {error}")
        return timed

    def _cost(self, counts: Mapping[str, int], timed: Mapping[str, FitRecord], seconds: Mapping[str, float]) -> str:
        plan, width = self.plan, max(map(len, self.plan.methods))
        word = "seed" if plan.divisions == 1 else "repetition"
        each = f"{plural(len(plan.learning_rates), 'learning rate')} x {plural(len(plan.picking), word)}"
        if plan.others:
            each = f"({each}, {plural(len(plan.others), word)} more with the picked one)"
        done = len(plan) - sum(counts.values())
        lines = [f"{len(plan.methods)} methods x {each} = {len(plan)} runs, of which {done} are finished"]
        for method in filter(counts.get, plan.methods):
            cost = "; the timed round failed"
            if method in timed:
                cost = f" of {timed[method].planned_rounds} rounds, about {duration(seconds[method])} each"
            lines.append(f"  {method:<{width}}  {counts[method]:>3} runs{cost}")
        known = [seconds[method] for method, count in counts.items() for _ in range(count) if method in seconds]
        if known:
            total = duration(max(sum(known) / self.jobs, *known))
            lines.append(f"together about {total} with {self.jobs} at a time (--jobs {self.jobs})")
        return "\n".join(lines)

    def _run(
        self, left: list[Run], later: Sequence[str], seconds: Mapping[str, float], measure: Measure
    ) -> dict[Run, str]:
        """Carries runs out, with a line for each that says how long the rest will take."""
        failures, unknown = dict[Run, str](), max(seconds.values(), default=1.0)
        open_ = [*(run.method for run in left), *later]
        whole, began = sum(seconds.get(method, unknown) for method in open_), time.perf_counter()

        def done(run: Run, found: Any) -> None:
            open_.remove(run.method)
            record = self.runner.finished(run)
            if isinstance(found, Failure) or record is None:
                failures[run] = words = found.error
                words = f"failed, {words}"
            else:
                (row,) = summaries(by_method([record]), measure.metric, measure.reported_on, measure.mode)
                words = f"{measure.metric} mean {row.mean.mean:.3f}, worst 10 % {row.worst_10.mean:.3f}"
                words += f" ({duration(row.seconds)})"
            rest = sum(seconds.get(method, unknown) for method in open_)
            pace = (time.perf_counter() - began) / max(whole - rest, 1e-9)  # seconds for a second of the estimate
            still = f"; about {duration(rest * pace)} left" if open_ else ""
            _say(f"[{len(self.plan) - len(open_)}/{len(self.plan)}] {run}: {words}{still}")

        work({run: partial(self.runner.carry_out, run) for run in left}, self.jobs, done)
        return failures


def _seconds(record: FitRecord, method: str) -> float:
    """What a run will take, by one timed round; clients that train alone do so one after the other."""
    fits = sum(size > 0 for size in record.client_sizes) if method == LOCAL else 1
    return fits * (record.planned_rounds or 1) * sum(seconds_of(record).values())


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
