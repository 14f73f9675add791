# SPDX-License-Identifier: Apache-2.0
"""Which metric counts, and which learning rate each method is reported with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from fl_lightning.arguments import nearest
from fl_lightning.comparison.plan import Plan, Run
from fl_lightning.metrics.functional import Mode
from fl_lightning.report import FitRecord
from fl_lightning.report.runs_of_a_method import PERSONAL, Method, Stage, goodness

Rule = Literal["mean", "worst_10"]
STAGES: tuple[Stage, Stage] = ("val", "test")
_VALIDATION = re.compile(r"^(val|valid|validation)(?=[_/.-])")


@dataclass(frozen=True)
class Measure:
    """Which of the clients' values count."""

    select: Rule
    selected_on: Stage | None  # None: there is nothing to pick
    picked_by: str  # name of the metric to pick by
    reported_on: Stage
    metric: str  # that the table has
    mode: Mode
    picked_mode: Mode | None = None  # None: as mode


def measure_of(
    record: FitRecord, several_rates: bool, metric: str | None, test_metric: str | None, select: Rule
) -> Measure:
    """Which metric is compared, and on which data; any fit has the metrics.

    The validation metric is by default the first where large values are good, or else the first. The test metric that
    belongs to it is by default the one whose name has ``test`` for ``val``, or else the one of the same name.
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
    if metric not in own:
        raise ValueError(f"metric must be one of {', '.join(own)}, found {metric!r}{nearest(metric, own)}")
    reported = metric if not test else test_metric or _test_name(metric, test)
    if reported not in (test or val):
        raise ValueError(
            f"test_metric must be one of {', '.join(test)}, the one that belongs to {metric!r}, found {test_metric!r}"
        )
    stage: Stage = "test" if test else "val"
    selected: Stage | None = "val" if several_rates else None
    # What belongs to a metric by its name is as good as that; any other, such as an accuracy for a loss, on its own.
    if not test or reported in (metric, _test_name(metric, test)):
        return Measure(select, selected, metric, stage, reported, own[metric])
    return Measure(select, selected, metric, stage, reported, test[reported], own[metric])


def _modes(record: FitRecord, stage: Stage) -> dict[str, Mode]:
    """The metrics of a stage but for those of the clients' own models, and which of their values are good."""
    found = record.last_values(stage)
    modes = {} if found is None else found.modes
    return {name: mode for name, mode in modes.items() if not name.startswith(PERSONAL)}


def _test_name(metric: str, names: Mapping[str, Mode]) -> str:
    renamed = _VALIDATION.sub("test", metric)
    return next((name for name in (renamed, metric) if name in names), "")


def chosen_rates(plan: Plan, results: Mapping[Run, FitRecord], measure: Measure) -> dict[str, float | None]:
    """The learning rate of each method: the one that is best on average over the repetitions to pick with.

    Learning rates of which a run failed, or ended with a value that is not finite, come behind all others. Of equals,
    the first counts. Methods of which no run is left are missing.
    """
    stage, mode = measure.selected_on, measure.picked_mode or measure.mode
    chosen: dict[str, float | None] = {}
    for method in plan.methods:
        ranks = []
        for rate in plan.learning_rates:
            planned = plan.of_method(method, rate)
            fits = {one: results[planned[one]] for one in plan.picking if planned[one] in results}
            if stage is None or not fits:
                ranks += [(len(fits), 0.0, rate)] * bool(fits)
                continue
            found = Method(method, fits)
            numbers = found.numbers(found.own(measure.picked_by, stage), stage, mode).get(measure.select, {}).values()
            ranks.append((len(numbers), fmean(goodness(n, mode) for n in numbers) if numbers else 0.0, rate))
        if ranks:
            chosen[method] = max(ranks, key=lambda rank: rank[:2])[2]
    return chosen
