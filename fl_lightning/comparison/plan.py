# SPDX-License-Identifier: Apache-2.0
"""Which runs a comparison has, which metric counts, and which learning rate each method is reported with."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import Literal

from fl_lightning.arguments import Bounds, checked, nearest
from fl_lightning.metrics.functional import Mode
from fl_lightning.report import FitRecord
from fl_lightning.report.conclusion import LOCAL, POOLED
from fl_lightning.report.repetitions import Repetition
from fl_lightning.report.runs_of_a_method import PERSONAL, Method, Stage, goodness

Bounding = Literal["both", "local", "pooled", "none"]
BOUNDS: Mapping[Bounding, tuple[str, ...]] = {
    "both": (LOCAL, POOLED), "local": (LOCAL,), "pooled": (POOLED,), "none": (),
}  # fmt: skip
"""Which bounds to train."""
Rule = Literal["mean", "worst_10"]
STAGES: tuple[Stage, Stage] = ("val", "test")
_VALIDATION = re.compile(r"^(val|valid|validation)(?=[_/.-])")
MOST = 1_000
"""Seeds, divisions and runs at a time: whoever asks for more has mistaken one number for another."""
_LONGEST = 60


@checked(learning_rate=Bounds(above=0), seed=Bounds(0), division=Bounds(0))
@dataclass(frozen=True)
class Run:
    """One fit of a comparison."""

    method: str  # what the table calls the method or the bound
    learning_rate: float | None  # of the clients; None: as the project says
    seed: int  # of the module's first weights and of everything random in the fit
    division: int = 0  # of the data among the clients

    def __str__(self) -> str:
        rate = "" if self.learning_rate is None else f", lr {self.learning_rate:g}"
        division = f", division {self.division}" if self.division else ""
        return f"{self.method}{rate}{division}, seed {self.seed}"

    @property
    def key(self) -> str:
        """Name of the run's file and folder: letters, digits, and signs that every file system takes."""
        name = re.sub(r"[^\w.=+-]+", "-", self.method, flags=re.ASCII)[:_LONGEST]
        name = name if name == self.method else f"{name}-{hashlib.sha256(self.method.encode()).hexdigest()[:8]}"
        rate = "own" if self.learning_rate is None else repr(self.learning_rate)
        division = f"--division-{self.division}" if self.division else ""
        return f"{name}--lr-{rate}{division}--seed-{self.seed}"


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison.

    With ``tuning_seeds``, learning rates are picked with the first so many seeds on the project's own division, and the
    other repetitions run with the picked one alone; without, each runs with every learning rate.
    """

    methods: tuple[str, ...]  # the first is the reference; bounds come last
    learning_rates: tuple[float | None, ...]  # to choose from; (None,): as the project says
    seeds: tuple[int, ...]
    tuning_seeds: int | None = None
    divisions: int = 1  # each runs with every seed

    def __post_init__(self) -> None:
        for name, values in (("learning_rates", self.learning_rates), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must hold one or more different values, found {list(values)}")
        if self.tuning_seeds is not None and self.tuning_seeds > len(self.seeds):
            raise ValueError(
                f"tuning_seeds must be at most the number of seeds, {len(self.seeds)}, found {self.tuning_seeds}"
            )

    def __len__(self) -> int:
        """All runs, those whose learning rates are not picked yet as well."""
        return len(self.methods) * (len(self.learning_rates) * len(self.picking) + len(self.others))

    @cached_property
    def repetitions(self) -> tuple[Repetition, ...]:
        """With what every method is repeated, a division after the other."""
        return tuple(Repetition(division, seed) for division in range(self.divisions) for seed in self.seeds)

    @cached_property
    def picking(self) -> tuple[Repetition, ...]:
        """Those that learning rates are picked with."""
        return self.repetitions if len(self.learning_rates) == 1 else self.repetitions[: self.tuning_seeds]

    @cached_property
    def others(self) -> tuple[Repetition, ...]:
        """Those that run with the picked learning rate alone."""
        return self.repetitions[len(self.picking) :]

    def grid(self) -> Iterator[Run]:
        """The runs to pick from: a repetition after the other, so that early results have all methods in them."""
        return (
            Run(method, rate, seed, division)
            for division, seed in self.picking
            for method in self.methods
            for rate in self.learning_rates
        )

    def further(self, picked: Mapping[str, float | None]) -> Iterator[Run]:
        """The runs of the other repetitions."""
        return (
            Run(method, picked[method], seed, division)
            for division, seed in self.others
            for method in self.methods
            if method in picked
        )

    def runs(self, picked: Mapping[str, float | None]) -> Iterator[Run]:
        """:meth:`grid`, and then :meth:`further`."""
        return chain(self.grid(), self.further(picked))

    def of_method(self, method: str, rate: float | None) -> dict[Repetition, Run]:
        """A method's runs with one learning rate."""
        return {repetition: Run(method, rate, repetition.seed, repetition.division) for repetition in self.repetitions}


def seed_list(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Seeds as people give them: how many, or which."""
    count = seeds if isinstance(seeds, int) else len(seeds)
    if count > MOST:
        raise ValueError(
            f"seeds must be at most {MOST:,} seeds, found {count:,}: a list, such as [{count}], names them"
        )
    return tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)


@dataclass(frozen=True)
class Measure:
    """Which of the clients' values count."""

    select: Rule
    selected_on: Stage | None  # None: there is nothing to pick
    picked_by: str  # name of the metric to pick by
    reported_on: Stage
    metric: str  # that the table has
    mode: Mode


def measure_of(record: FitRecord, several_rates: bool, metric: str | None, select: Rule) -> Measure:
    """Which metric is compared, and on which data; any fit has the metrics.

    The metric is one of validation, by default the first where large values are good, or else the first. Reported is
    the test metric whose name has ``test`` for ``val``, or else the one of the same name. Where there is nothing to
    pick, the metric may also be one of the test.
    """
    val, test = (_modes(record, stage) for stage in STAGES)
    if not val and (several_rates or not test):
        wanted = "to pick learning rates on" if several_rates else "or a test split to report on"
        raise ValueError(
            f"the data must have a validation split {wanted}, and the module must log a metric there, found neither: "
            "FederatedDataModule(holdout=0.2) sets some training data aside"
        )
    own = val or test
    if metric is None:
        metric = next((name for name, mode in own.items() if mode == "max"), next(iter(own)))
    known = own if several_rates else {**own, **test, **own}
    if metric not in known:
        raise ValueError(f"metric must be one of {', '.join(known)}, found {metric!r}{nearest(metric, known)}")
    reported = _test_name(metric, test) if test else metric
    if not reported:
        raise ValueError(
            f"the module must log a test metric that belongs to {metric!r} by its name, found {', '.join(test)}"
        )
    stages: tuple[Stage | None, Stage] = "val" if several_rates else None, "test" if test else "val"
    return Measure(select, stages[0], metric, stages[1], reported, known[metric])


def _modes(record: FitRecord, stage: Stage) -> dict[str, Mode]:
    """The metrics of a stage but for those of the clients' own models, and which of their values are good."""
    found = record.last_values(stage)
    modes = {} if found is None else found.modes
    return {name: mode for name, mode in modes.items() if not name.startswith(PERSONAL)}


def _test_name(metric: str, names: Mapping[str, Mode]) -> str:
    renamed = _VALIDATION.sub("test", metric)
    return next((name for name in (renamed, metric) if name in names), "")


def picked_rates(plan: Plan, results: Mapping[Run, FitRecord], measure: Measure) -> dict[str, float | None]:
    """The learning rate of each method: the one that is best on average over the repetitions to pick with.

    Learning rates of which a run failed, or ended with a value that is not finite, come behind all others. Of equals,
    the first counts. Methods of which no run is left are missing.
    """
    stage, mode = measure.selected_on, measure.mode
    picked: dict[str, float | None] = {}
    for method in plan.methods:
        ranks = []
        for rate in plan.learning_rates:
            runs = plan.of_method(method, rate)
            fits = {one: results[runs[one]] for one in plan.picking if runs[one] in results}
            if stage is None or not fits:
                ranks += [(len(fits), 0.0, rate)] * bool(fits)
                continue
            found = Method(method, fits)
            numbers = found.numbers(found.own(measure.picked_by, stage), stage, mode).get(measure.select, {}).values()
            ranks.append((len(numbers), fmean(goodness(n, mode) for n in numbers) if numbers else 0.0, rate))
        if ranks:
            picked[method] = max(ranks, key=lambda rank: rank[:2])[2]
    return picked
