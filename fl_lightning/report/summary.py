# SPDX-License-Identifier: Apache-2.0
"""The rows of a table of methods: means and deviations over repetitions, and differences to the first method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.repetitions import Repetition, Spread, mark
from fl_lightning.report.runs_of_a_method import Method, Stage


@dataclass(frozen=True)
class Figure:
    """A number over repetitions."""

    spread: Spread | None = None  # mean and standard deviation; None without any number
    mark: str = ""  # see repetitions.mark

    @property
    def mean(self) -> float:
        """The mean over the repetitions; NaN without any number."""
        return nan if self.spread is None else self.spread.mean

    @property
    def deviation(self) -> float:
        """The standard deviation of a single fit's number; NaN with one repetition."""
        return nan if self.spread is None or self.spread.deviation is None else self.spread.deviation


@dataclass(frozen=True)
class MethodSummary:
    """A row of the table."""

    method: str
    bound: str = ""  # what the bound is called, if the row is one
    learning_rate: float | None = None  # of its clients; None without a single one
    repetitions: int = 0  # that ran to their end
    mean: Figure = Figure()  # over the clients
    worst_10: Figure = Figure()  # over the worst tenth of them
    worst_client: str = ""  # with the worst mean over the seeds; empty where several divisions make clients anew
    worst: Figure = Figure()  # its value; with several divisions, that of the worst client of each
    angle: Figure = Figure()  # fairness angle in radians; without numbers where small values are good
    std: Figure = Figure()  # over the clients
    conflicts: float = nan  # share of a round's clients in conflict with the step; NaN for bounds
    seconds: float = nan  # of all rounds of a run, with their evaluations
    not_finite: int = 0  # repetitions whose numbers are not finite, and left out
    without_value: int = 0  # clients that other rows count, without a value in one repetition at least
    infinite: bool = False  # a client's value is infinite at the end of a repetition
    numbers: Mapping[str, Mapping[Repetition, float]] = field(default_factory=dict)  # by name, of each repetition


def summaries(
    methods: Sequence[Method], metric: str, stage: Stage, mode: Mode, reference: str | None = None
) -> list[MethodSummary]:
    """One row per method.

    A metric's values are those of the clients' own models, where they have any. The reference, by default the first
    method, is what the others are compared with.
    """
    named = {method.label: (method, method.own(metric, stage)) for method in methods}
    numbers = {label: method.numbers(name, stage, mode) for label, (method, name) in named.items()}
    base = numbers.get(next(iter(named), "") if reference is None else reference, {})
    counted = {label: _with_value(method, name, stage) for label, (method, name) in named.items()}
    everyone = set[int]().union(*(clients for several in counted.values() for clients in several))
    rows = []
    for label, (method, name) in named.items():
        figures = {
            key: Figure(
                Spread.of(found.values()), mark(found, base.get(key, {}), mode == "max" and key not in ("angle", "std"))
            )
            for key, found in numbers[label].items()
            if key in ("mean", "worst_10", "worst", "angle", "std")
        }
        who, several = method.worst_client(name, stage, mode), counted[label]
        row = MethodSummary(
            method=label,
            bound=method.first.method if method.is_bound else "",
            learning_rate=method.first.learning_rate,
            repetitions=len(method.fits),
            worst_client="" if who is None else method.first.client_names[who],
            conflicts=nan if method.conflicts is None else method.conflicts,
            seconds=nan if method.seconds is None else method.seconds,
            not_finite=len(method.fits) - len(numbers[label].get("mean", ())),
            without_value=len(everyone - several[0].intersection(*several)) if several else 0,
            infinite=method.ends_infinite(name, stage) > 0,
            numbers=numbers[label],
            **figures,
        )
        rows.append(row)
    return rows


def _with_value(method: Method, metric: str, stage: Stage) -> list[set[int]]:
    """The clients with a value, of each fit in which some have one."""
    found = ({c for c, value in values.items() if isfinite(value)} for values in method.ends(metric, stage).values())
    return [clients for clients in found if clients]
