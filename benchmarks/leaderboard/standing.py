# SPDX-License-Identifier: Apache-2.0
"""What the finished runs of a suite say: a row per method, with differences to the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan, nan
from statistics import fmean

import numpy as np
import torch

from benchmarks.leaderboard.bootstrap import Interval, Values, difference, mean, worst_tenth
from benchmarks.leaderboard.suites import Suite
from fl_lightning.comparison.plan import Measure, Plan, Run, picked_rates
from fl_lightning.metrics.group_frame import rates
from fl_lightning.report import ClientValues, FitRecord
from fl_lightning.report.conclusion import LOCAL
from fl_lightning.report.repetitions import Repetition
from fl_lightning.report.runs_of_a_method import Method, by_method, seconds_of
from fl_lightning.report.tables import MethodSummary, summaries

ACCURACY = Measure("mean", "val", "val_acc", "test", "test_acc", "max")
AUROC = replace(ACCURACY, metric="test_auroc")
PARITY = replace(ACCURACY, metric="test_dp_gap", mode="min")
OTHERS = {"test_dp_gap": "parity gap", "test_odds_gap": "odds gap", "test_conflicts": "conflicts in products"}
"""Metrics whose mean over the clients has a column, and its name."""
PEOPLE = ("parity gap of all people", "accuracy of the worst group")
"""What :func:`people_together` says of a run."""
MEMBERS = "test_members_0"
_METRICS = {"accuracy": "accuracy", "auroc": "AUROC", "parity": "parity gap"}
REACHED = 0.95
"""Share of the reference's final mean that a method has to reach."""


@dataclass(frozen=True)
class Row:
    """A method.

    Attributes:
        accuracy: its numbers by accuracy.
        auroc: the same by AUROC.
        others: mean over the clients of each metric of :data:`OTHERS` that they have; then :data:`PEOPLE`. By column.
        tried: with how many learning rates it ran to its end.
        failed: with how many it came to nothing.
        rounds: until the mean on validation data was at 95 % of the reference's last one; NaN: not in all seeds.
        client_seconds: that clients trained until then, at the pace of the fastest run: the machine may do other things
            during some of them.
        seconds: of the fastest run; NaN for clients alone.
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
    finished: Mapping[str, FitRecord]
    failed: Mapping[str, str]

    @cached_property
    def plan(self) -> Plan:
        """All runs of the suite."""
        return self.suite.plan

    @cached_property
    def picked(self) -> Mapping[str, float | None]:
        """The learning rates of the methods that have runs."""
        return picked_rates(self.plan, self._of(self.plan.grid()), ACCURACY)

    @cached_property
    def results(self) -> Mapping[Run, FitRecord]:
        """What the runs have left that count."""
        return self._of(self.plan.runs(self.picked))

    @property
    def missing(self) -> list[str]:
        """Methods without any run."""
        return [method for method in self.plan.methods if method not in self.picked]

    @cached_property
    def rows(self) -> list[Row]:
        """One per method that has runs, in the order of the suite."""
        both = (
            summaries(list(self._methods.values()), each.metric, each.reported_on, each.mode, self.plan.methods[0])
            for each in (ACCURACY, AUROC)
        )
        return [self._row(accuracy, auroc) for accuracy, auroc in zip(*both, strict=True)]

    @property
    def failures(self) -> int:
        """How many of the runs that count came to nothing."""
        return sum(run.key in self.failed for run in self.plan.runs(self.picked))

    def seconds(self) -> float:
        """Of all finished runs."""
        return sum(map(seconds_of_run, self.results.values()))

    def _row(self, accuracy: MethodSummary, auroc: MethodSummary) -> Row:
        method = accuracy.method
        grid = [run for run in self.plan.grid() if run.method == method]
        bound = method == LOCAL  # a fit per client, without rounds of all
        rounds = nan if bound else fmean(rounds_to(record, self._goal) for record in self._methods[method].records)
        runs = [record for run, record in self.results.items() if run.method == method]
        named = {} if bound else OTHERS
        means = {title: self._mean(method, replace(ACCURACY, metric=name)) for name, title in named.items()}
        tests = [record.last_values("test") for record in self._methods[method].records]
        people = [people_together(values) for values in tests if values is not None and values.values.get(MEMBERS)]
        means |= {title: fmean(one[title] for one in people) for title in PEOPLE if people}
        tried, lost = sum(run in self.results for run in grid), sum(run.key in self.failed for run in grid)
        return Row(
            accuracy,
            auroc,
            {title: value for title, value in means.items() if not isnan(value)},
            tried,
            lost,
            rounds,
            nan if bound else rounds * min(map(training_seconds, runs)),
            nan if bound else min(map(seconds_of_run, runs)),
            {} if method == self.plan.methods[0] or tried + lost < len(grid) else self._differences(method),
        )

    @cached_property
    def _methods(self) -> dict[str, Method]:
        """The methods that have runs with the learning rate that was picked."""
        planned = (
            run
            for method, rate in self.picked.items()
            for run in self.plan.of_method(method, rate).values()
            if run in self.results
        )
        return {method.label: method for method in by_method([self.results[run] for run in planned])}

    @cached_property
    def _goal(self) -> float:
        reference = self._methods.get(self.plan.methods[0])
        return nan if reference is None else REACHED * fmean(curve(record)[-1][1] for record in reference.records)

    def _mean(self, method: str, measure: Measure) -> float:
        values = [found.values() for found in _ends(self._methods[method], measure).values()]
        return fmean(map(fmean, values)) if all(values) else nan

    def _differences(self, method: str) -> dict[tuple[str, str], Interval]:
        reference = self._methods.get(self.plan.methods[0])
        found: dict[tuple[str, str], Interval] = {}
        for name, measure in (("accuracy", ACCURACY), ("auroc", AUROC), ("parity", PARITY)):
            ours = _ends(self._methods[method], measure)
            theirs = {} if reference is None else _ends(reference, measure)
            seeds = [seed for seed in ours if seed in theirs]
            pair = [values_of(ends[seed] for seed in seeds) for ends in (ours, theirs)]
            clients = int((~np.isnan(pair[0] + pair[1]).any(0)).sum()) if seeds else 0
            statistics = STATISTICS if clients >= FEW and name != "parity" else {"mean": mean}
            if clients:
                found |= {(name, key): difference(pair[0], pair[1], each) for key, each in statistics.items()}
        return found

    def _of(self, runs: Iterable[Run]) -> dict[Run, FitRecord]:
        return {run: self.finished[run.key] for run in runs if run.key in self.finished}


STATISTICS = {"mean": mean, "worst 10 %": worst_tenth}
COLUMNS = {
    (metric, key): f"{name}, {key}"
    for metric, name in _METRICS.items()
    for key in STATISTICS
    if (metric, key) != ("parity", "worst 10 %")
}
"""What is compared, metric and statistic, in words."""

FEW = 25
"""Of fewer clients, the worst tenth is one or two, and drawing clients anew says nothing about it."""


def columns_of(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Those of :data:`COLUMNS` that some row has."""
    held = {column for row in rows for column in row.differences}
    return [column for column in COLUMNS if column in held]


def values_of(ends: Iterable[Mapping[int, float]]) -> Values:
    """``[S, N]`` the clients' values of several seeds; NaN where there is none."""
    return np.array([list(values.values()) for values in ends], dtype=float)


def _ends(method: Method, measure: Measure) -> dict[Repetition, dict[int, float]]:
    return method.ends(method.own(measure.metric, measure.reported_on), measure.reported_on)


def people_together(values: ClientValues) -> dict[str, float]:
    """The largest difference in how often groups are predicted 1, and the lowest accuracy of a group, over all clients.

    By the names of :data:`PEOPLE`. Groups without anybody are left out.
    """
    groups = range(sum(name.startswith("test_members_") for name in values.values))
    shares = [[values.values[f"test_{name}_{group}"] for group in groups] for name in ("members", "ones", "right")]
    members, ones, right = torch.tensor(shares, dtype=torch.float64) @ torch.tensor(values.sizes, dtype=torch.float64)
    return dict(
        zip(PEOPLE, (float(rates(ones, members).difference()), float(rates(right, members).group_min())), strict=True)
    )


def seconds_of_run(record: FitRecord) -> float:
    """Of training, the server, evaluations and reports."""
    return sum(seconds_of(record).values())


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
