# SPDX-License-Identifier: Apache-2.0
"""What the finished runs of a suite say: a row per method, with differences to the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan, nan
from statistics import fmean

import numpy as np

from benchmarks.leaderboard.bootstrap import Interval, Values, difference, mean, worst_tenth
from benchmarks.leaderboard.suites import Suite
from fl_lightning.comparison.fitted import Fitted
from fl_lightning.comparison.plan import Plan, Run
from fl_lightning.comparison.selection import Measure, chosen_rates
from fl_lightning.comparison.summary import MethodSummary, client_values, summaries
from fl_lightning.report import FitRecord
from fl_lightning.report.conclusion import LOCAL
from fl_lightning.report.repetitions import Repetition

ACCURACY = Measure("mean", "val", "val_acc", "test", "test_acc", "max")
AUROC = replace(ACCURACY, metric="test_auroc")
OTHERS = {"test_dp_gap": "parity gap", "test_odds_gap": "odds gap", "test_conflicts": "conflicts in products"}
"""Metrics whose mean over the clients has a column, and its name."""
_METRICS = {"accuracy": "accuracy", "auroc": "AUROC"}
REACHED = 0.95
"""Share of the reference's final mean that a method has to reach."""


@dataclass(frozen=True)
class Row:
    """A method.

    Attributes:
        accuracy: its numbers by accuracy.
        auroc: the same by AUROC.
        others: mean over the clients of each metric of :data:`OTHERS` that they have.
        tried: with how many learning rates it ran to its end.
        failed: with how many it came to nothing.
        rounds: until the mean on validation data was at 95 % of the reference's last one; NaN: not in all seeds.
        client_seconds: that clients trained until then, at the pace of the fastest run: the machine may do other things
            during some of them.
        seconds: of the fastest run.
        differences: to the reference, by metric and statistic; empty for the reference itself, and as long as learning
            rates are to come.
    """

    accuracy: MethodSummary
    auroc: MethodSummary
    others: Mapping[str, float]
    tried: int
    failed: int
    rounds: float
    client_seconds: float
    seconds: float
    differences: Mapping[tuple[str, str], Interval]


@dataclass(frozen=True)
class Standing:
    """The finished runs of a suite.

    Attributes:
        suite: which.
        finished: what they have left, by key.
        failed: why others came to nothing, by key.
    """

    suite: Suite
    finished: Mapping[str, Fitted]
    failed: Mapping[str, str]

    @cached_property
    def plan(self) -> Plan:
        """All runs of the suite."""
        return self.suite.plan

    @cached_property
    def picked(self) -> Mapping[str, float | None]:
        """The learning rates of the methods that have runs."""
        return chosen_rates(self.plan, self._of(self.plan.grid()), ACCURACY)

    @cached_property
    def results(self) -> Mapping[Run, Fitted]:
        """What the runs have left that count."""
        return self._of(self.plan.runs(self.picked))

    @property
    def missing(self) -> list[str]:
        """Methods without any run."""
        return [method for method in self.plan.methods if method not in self.picked]

    @cached_property
    def rows(self) -> list[Row]:
        """One per method that has runs, in the order of the suite."""
        both = (summaries(self.plan, self.results, self.picked, measure) for measure in (ACCURACY, AUROC))
        return [self._row(accuracy, auroc) for accuracy, auroc in zip(*both, strict=True)]

    @property
    def failures(self) -> int:
        """How many of the runs that count came to nothing."""
        return sum(run.key in self.failed for run in self.plan.runs(self.picked))

    def seconds(self) -> float:
        """Of all finished runs."""
        return sum(one.seconds for one in self.results.values())

    def _row(self, accuracy: MethodSummary, auroc: MethodSummary) -> Row:
        method = accuracy.method
        fits, grid = self._fits(method), [run for run in self.plan.grid() if run.method == method]
        bound = method == LOCAL  # one fit per client, without rounds of its own
        rounds = nan if bound else fmean(rounds_to(fitted.record, self._goal) for fitted in fits.values())
        runs = [fitted for run, fitted in self.results.items() if run.method == method]
        means = {} if bound else {name: self._mean(method, replace(ACCURACY, metric=name)) for name in OTHERS}
        tried, lost = sum(run in self.results for run in grid), sum(run.key in self.failed for run in grid)
        return Row(
            accuracy,
            auroc,
            {name: value for name, value in means.items() if not isnan(value)},
            tried,
            lost,
            rounds,
            nan if bound else rounds * min(training_seconds(fitted.record) for fitted in runs),
            min(fitted.seconds for fitted in runs),
            {} if method == self.plan.reference or tried + lost < len(grid) else self._differences(method),
        )

    def _fits(self, method: str) -> dict[Repetition, Fitted]:
        if method not in self.picked:
            return {}
        runs = self.plan.of_method(method, self.picked[method])
        return {one: self.results[run] for one, run in runs.items() if run in self.results}

    @cached_property
    def _goal(self) -> float:
        ends = [curve(fitted.record)[-1][1] for fitted in self._fits(self.plan.reference).values()]
        return REACHED * fmean(ends) if ends else nan

    def _mean(self, method: str, measure: Measure) -> float:
        values = [client_values(fitted, measure).values() for fitted in self._fits(method).values()]
        return fmean(map(fmean, values)) if all(values) else nan

    def _differences(self, method: str) -> dict[tuple[str, str], Interval]:
        ours, reference = self._fits(method), self._fits(self.plan.reference)
        both = [one for one in ours if one in reference]
        found: dict[tuple[str, str], Interval] = {}
        for name, measure in (("accuracy", ACCURACY), ("auroc", AUROC)):
            pair = [values_of([fits[one] for one in both], measure) for fits in (ours, reference)]
            clients = int((~np.isnan(pair[0] + pair[1]).any(0)).sum()) if both else 0
            statistics = STATISTICS if clients >= FEW else {"mean": mean}
            if clients:
                found |= {(name, key): difference(pair[0], pair[1], each) for key, each in statistics.items()}
        return found

    def _of(self, runs: Iterable[Run]) -> dict[Run, Fitted]:
        return {run: self.finished[run.key] for run in runs if run.key in self.finished}


STATISTICS = {"mean": mean, "worst 10 %": worst_tenth}
COLUMNS = {(metric, key): f"{name}, {key}" for metric, name in _METRICS.items() for key in STATISTICS}
"""What is compared, metric and statistic, in words."""

FEW = 25
"""Of fewer clients, the worst tenth is one or two, and drawing clients anew says nothing about it."""


def columns_of(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Those of :data:`COLUMNS` that some row has."""
    held = {column for row in rows for column in row.differences}
    return [column for column in COLUMNS if column in held]


def values_of(fits: Sequence[Fitted], measure: Measure) -> Values:
    """``[S, N]`` the clients' values of several repetitions; NaN where there is none."""
    return np.array([list(client_values(fitted, measure).values()) for fitted in fits], dtype=float)


def curve(record: FitRecord) -> list[tuple[int, float]]:
    """Rounds, and the clients' mean accuracy on validation data after them; of own models, where clients have them."""
    series = {each.metric: each for each in record.metrics if each.stage == "val"}
    found = series.get("personal/val_acc", series.get("val_acc"))
    assert found is not None
    return [(number, nan if m is None else m) for number, m in zip(found.rounds, found.summaries["mean"], strict=True)]


def rounds_to(record: FitRecord, goal: float) -> float:
    """Rounds until the curve is at a goal; NaN if it never is."""
    return next((float(number) for number, value in curve(record) if value >= goal), nan)


def training_seconds(record: FitRecord) -> float:
    """Seconds of a round in which clients trained."""
    return fmean(record.rounds.training_seconds)
