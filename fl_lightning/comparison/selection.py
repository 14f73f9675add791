# SPDX-License-Identifier: Apache-2.0
"""Which learning rate each method is reported with, and what its runs say."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Literal

import torch

from fl_lightning.comparison.fitted import Fitted
from fl_lightning.comparison.plan import Plan, Run
from fl_lightning.metrics.functional import Mode, fairness_summary
from fl_lightning.report import ClientValues, FitRecord
from fl_lightning.report.runs_of_a_method import PERSONAL, count_infinite, goodness

Rule = Literal["mean", "worst_10"]
Stage = Literal["val", "test"]
STAGES: tuple[Stage, Stage] = ("val", "test")
_VALIDATION = re.compile(r"^(val|valid|validation)(?=[_/.-])")


@dataclass(frozen=True)
class Measure:
    """Which of the clients' values count.

    Attributes:
        select: what the learning rate is picked by: ``"mean"``, the mean over the clients, or ``"worst_10"``, the mean
            of their worst tenth.
        selected_on: stage of the values to pick by; ``None`` where there is nothing to pick.
        picked_by: name of their metric.
        reported_on: stage of the values in the table.
        metric: name of their metric.
        mode: which of its values are good.
        picked_mode: which of the values to pick by are good; ``None``: the same.
    """

    select: Rule
    selected_on: Stage | None
    picked_by: str
    reported_on: Stage
    metric: str
    mode: Mode
    picked_mode: Mode | None = None


def measure_of(
    metrics: Mapping[str, Mapping[str, Mode]],
    several_rates: bool,
    metric: str | None,
    test_metric: str | None,
    select: Rule,
) -> Measure:
    """Which metric is compared, and on which data.

    Args:
        metrics: by stage, the metrics that clients have values of, and their modes.
        several_rates: whether there are learning rates to pick from.
        metric: the validation metric; default the first where large values are good, or else the first.
        test_metric: the test metric that belongs to it; default the one whose name has ``test`` for ``val``, or else
            the one of the same name.
        select: what to pick by.

    Raises:
        ValueError: there is no such metric, or no data to pick or report on.
    """
    val, test = (_global_ones(metrics.get(stage, {})) for stage in STAGES)
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
        raise ValueError(f"metric must be one of {', '.join(own)}, found {metric!r}{_nearest(metric, own)}")
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


def _global_ones(metrics: Mapping[str, Mode]) -> dict[str, Mode]:
    return {name: mode for name, mode in metrics.items() if not name.startswith(PERSONAL)}


def _test_name(metric: str, names: Mapping[str, Mode]) -> str:
    renamed = _VALIDATION.sub("test", metric)
    return next((name for name in (renamed, metric) if name in names), "")


def _nearest(name: str, names: Mapping[str, Mode]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def values_of(record: FitRecord, stage: Stage, metric: str) -> tuple[ClientValues, list[float]] | None:
    """Clients' values at the end of a fit, NaN for clients without one; those of their own models, where they have any.

    Where the value of a client is infinite, all are NaN.
    """
    found = record.last_values(stage)
    name = None if found is None else next((n for n in (f"{PERSONAL}{metric}", metric) if n in found.values), None)
    if found is None or name is None:
        return None
    # The others' values alone would flatter a fit that ends with an infinite one.
    numbers = (None,) * len(found.client_ids) if count_infinite(record, found, name) else found.values[name]
    return found, [float("nan") if value is None else value for value in numbers]


def summary_of(record: FitRecord, stage: Stage, metric: str, mode: Mode) -> Mapping[str, float]:
    """How a metric is spread over the clients at the end of a fit; empty if it has no values."""
    found = values_of(record, stage, metric)
    if found is None:
        return {}
    values = torch.tensor(found[1], dtype=torch.float64)
    values = values.abs() if mode == "abs" else values
    sizes = torch.tensor(found[0].sizes)
    summary = fairness_summary(values, sizes, larger_is_better=mode == "max")
    return {name: float(number) for name, number in summary.items()}


def chosen_rates(plan: Plan, results: Mapping[Run, Fitted], measure: Measure) -> dict[str, float | None]:
    """The learning rate of each method: the one that is best on average over the repetitions to pick with.

    Learning rates of which a run failed, or ended with a value that is not finite, come behind all others. Of equals,
    the first counts. Methods of which no run is left are missing.
    """
    chosen: dict[str, float | None] = {}
    for method in plan.methods:
        ranks = []
        for rate in plan.learning_rates:
            planned = plan.of_method(method, rate)
            runs = [run for repetition in plan.picking if (run := planned[repetition]) in results]
            if measure.selected_on is None and runs:
                ranks.append((len(runs), 0.0, rate))
                continue
            numbers = [_number(results[run].record, measure) for run in runs]
            numbers = [number for number in numbers if isfinite(number)]
            if runs:
                ranks.append((len(numbers), fmean(numbers) if numbers else float("-inf"), rate))
        if ranks:
            chosen[method] = max(ranks, key=lambda rank: rank[:2])[2]
    return chosen


def _number(record: FitRecord, measure: Measure) -> float:
    """The larger the better."""
    assert measure.selected_on is not None
    mode = measure.picked_mode or measure.mode
    summary = summary_of(record, measure.selected_on, measure.picked_by, mode)
    return goodness(summary.get(measure.select, float("nan")), mode)
