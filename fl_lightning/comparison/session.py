# SPDX-License-Identifier: Apache-2.0
"""Carries a comparison out: the cost first, then the runs that are left, then what they say."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fl_lightning.comparison.comparison import Comparison
from fl_lightning.comparison.cost import Timing, cost_text
from fl_lightning.comparison.fitted import Fitted
from fl_lightning.comparison.folder import Folder
from fl_lightning.comparison.plan import Plan, Run
from fl_lightning.comparison.pool import Failure, Task, work
from fl_lightning.comparison.progress import Progress
from fl_lightning.comparison.runner import Runner
from fl_lightning.comparison.selection import STAGES, Measure, Rule, chosen_rates, measure_of, summary_of


@dataclass(frozen=True)
class Session:
    """A comparison that is to be carried out, or gone on with.

    Attributes:
        runner: carries out single runs.
        plan: all runs.
        configuration: whatever changes results, by name, of the project and of each method.
        metric: the validation metric to compare, if not the default one.
        test_metric: the test metric that belongs to it, if not the default one.
        select: what learning rates are picked by.
        jobs: runs at a time.
    """

    runner: Runner
    plan: Plan
    configuration: Mapping[str, Mapping[str, Any]]
    metric: str | None
    test_metric: str | None
    select: Rule
    jobs: int

    def carry_out(self, only_cost: bool = False) -> Comparison | None:
        """Says what it will cost, does what is not done yet, and writes the tables.

        Raises:
            ValueError: the folder holds runs of another configuration or of other data, or there is no metric or data
                to compare on.
            RuntimeError: another command is at work in the folder, or every run failed.
        """
        folder = Folder(self.runner.folder)
        with folder.owned():
            folder.check(self.configuration)
            plan = self.plan
            results = self._finished(plan.grid())
            if plan.divisions > 1 and not any(run.division for run in results):
                self.runner.check_divisions(next(plan.grid()))
            grid = [run for run in plan.grid() if run not in results]
            # What would be picked now; runs that are left may change it.
            picked = chosen_rates(plan, results, self._measure(results, {})) if results else {}
            further = self._left(plan.further(picked))
            later = [run.method for run in further]
            later += [method for _ in plan.others for method in plan.methods if method not in picked]
            # Rates with which a run has ended come first: others may not train at all.
            timings = self._timings(folder, [*further, *grid], bool(results))
            counts = Counter(run.method for run in grid) + Counter(later)
            _say(cost_text(plan, {method: counts[method] for method in plan.methods}, timings, self.jobs))
            measure = self._measure(results, timings)
            if only_cost:
                return None
            failures = self._run(grid, later, timings, measure)
            results = self._finished(plan.grid())
            if not results:
                raise RuntimeError(f"all {len(plan)} runs failed, the first with {next(iter(failures.values()))}")
            picked = chosen_rates(plan, results, measure)
            failures |= self._run(self._left(plan.further(picked)), [], timings, measure)
            comparison = Comparison(plan, self._finished(plan.runs(picked)), failures, measure)
            comparison.write(self.runner.folder)
            return comparison

    def _finished(self, runs: Iterable[Run]) -> dict[Run, Fitted]:
        return {run: fitted for run in runs if (fitted := self.runner.finished(run)) is not None}

    def _left(self, runs: Iterable[Run]) -> list[Run]:
        return [run for run in runs if self.runner.finished(run) is None]

    def _timings(self, folder: Folder, left: list[Run], proven: bool) -> dict[str, Timing]:
        """Times one round of each method that has runs to do and was not timed before.

        Args:
            folder: where timings are kept.
            left: the runs to do; the first of each method is timed.
            proven: whether a run has come to its end already.

        Raises:
            RuntimeError: no round could be timed, and nothing says that the project can train.
        """
        timings, failed = folder.timings(), dict[str, str]()
        first: dict[str, Run] = {}
        for run in left:
            first.setdefault(run.method, run)
        tasks: dict[Run, Task] = {
            run: partial(_timed, self.runner, run) for method, run in first.items() if method not in timings
        }
        if tasks:
            _say(f"Timing one round of {', '.join(run.method for run in tasks)} ...")

        def done(run: Run, found: Any) -> None:
            if isinstance(found, Failure):
                failed[run.method] = found.error
            else:
                timings[run.method] = found
                folder.keep_timings(timings)

        work(tasks, self.jobs, lambda run: None, done)
        for method, error in failed.items():
            _say(f"{method}: {error}")
        if failed and not timings and not proven:
            raise RuntimeError(
                f"no method could train a round; {next(iter(failed))} failed with {next(iter(failed.values()))}"
            )
        return timings

    def _measure(self, results: Mapping[Run, Fitted], timings: Mapping[str, Timing]) -> Measure:
        metrics = [timing.metrics for timing in timings.values()]
        for fitted in results.values():
            found = {stage: fitted.record.last_values(stage) for stage in STAGES}
            metrics.append({stage: values.modes for stage, values in found.items() if values is not None})
        several = len(self.plan.learning_rates) > 1
        return measure_of(metrics[0], several, self.metric, self.test_metric, self.select)

    def _run(
        self, left: list[Run], later: list[str], timings: Mapping[str, Timing], measure: Measure
    ) -> dict[Run, str]:
        failures: dict[Run, str] = {}
        if not left:
            return failures
        tasks: dict[Run, Task] = {run: partial(_carried_out, self.runner, run) for run in left}
        with Progress(len(self.plan), left, later, timings) as progress:

            def done(run: Run, found: Any) -> None:
                if isinstance(found, Failure):
                    failures[run] = found.error
                    progress.finished(run, 0.0, f"failed, {found.error}")
                    return
                fitted = self.runner.finished(run)
                assert fitted is not None
                number = summary_of(fitted.record, measure.reported_on, measure.metric, measure.mode)
                words = ", ".join(f"{name} {number[key]:.3f}" for key, name in _WORDS.items() if key in number)
                progress.finished(run, fitted.seconds, f"{measure.metric} {words}")

            work(tasks, self.jobs, progress.told, done)
        return failures


_WORDS = {"mean": "mean", "worst_10": "worst 10 %"}


def _timed(runner: Runner, run: Run, tell: Any) -> Timing:
    return runner.time(run)


def _carried_out(runner: Runner, run: Run, tell: Any) -> None:
    runner.carry_out(run, tell)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
