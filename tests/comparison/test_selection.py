# SPDX-License-Identifier: Apache-2.0
"""Which learning rate is picked, which metric counts, and which differences are marked, on records made by hand."""

import csv
import io
from dataclasses import replace

import pytest
from made_records import ACCURACY, fitted, runs

from fl_lightning.comparison.files import runs_csv
from fl_lightning.comparison.plan import Plan, Run
from fl_lightning.comparison.selection import Measure, chosen_rates, measure_of, summary_of, values_of
from fl_lightning.comparison.summary import summaries, worst_client
from fl_lightning.comparison.table import notes
from fl_lightning.report import MetricSeries

EVEN, UNEVEN = (0.6, 0.6, 0.6, 0.6), (0.9, 0.9, 0.9, 0.1)
PLAN = Plan(("A",), (0.1, 0.5), (0, 1))


def test_the_rule_decides_between_a_better_mean_and_a_better_worst_tenth():
    results = runs("A", {0.1: [EVEN, EVEN], 0.5: [UNEVEN, UNEVEN]})
    assert chosen_rates(PLAN, results, ACCURACY) == {"A": 0.5}  # .7 against .6
    assert chosen_rates(PLAN, results, replace(ACCURACY, select="worst_10")) == {"A": 0.1}  # .1 against .6


def test_the_mean_over_the_seeds_counts_and_of_equals_the_first():
    one_good_seed = runs("A", {0.1: [EVEN, EVEN], 0.5: [(1.0,) * 4, (0.1,) * 4]})
    assert chosen_rates(PLAN, one_good_seed, ACCURACY) == {"A": 0.1}
    assert chosen_rates(PLAN, runs("A", {0.1: [EVEN, EVEN], 0.5: [EVEN, EVEN]}), ACCURACY) == {"A": 0.1}


def test_it_is_picked_on_validation_and_not_on_test():
    results = {
        Run("A", rate, seed): fitted({"val_acc": (val,) * 4, "test_acc": (test,) * 4})
        for rate, val, test in ((0.1, 0.8, 0.2), (0.5, 0.7, 0.9))
        for seed in PLAN.seeds
    }
    assert chosen_rates(PLAN, results, ACCURACY) == {"A": 0.1}


def test_a_rate_with_a_failed_or_endless_run_comes_last():
    results = runs("A", {0.1: [EVEN, EVEN], 0.5: [UNEVEN, UNEVEN]})
    del results[Run("A", 0.5, 1)]
    assert chosen_rates(PLAN, results, ACCURACY) == {"A": 0.1}
    results[Run("A", 0.5, 1)] = fitted({"val_acc": (None,) * 4})  # diverged
    assert chosen_rates(PLAN, results, ACCURACY) == {"A": 0.1}
    del results[Run("A", 0.1, 0)], results[Run("A", 0.1, 1)]
    assert chosen_rates(PLAN, results, ACCURACY) == {"A": 0.5}
    assert chosen_rates(PLAN, {}, ACCURACY) == {}


def with_series(one, stage, metric, counted):
    """A fit whose summary counts so many clients with a value."""
    series = MetricSeries(metric, stage, "min", (5,), {"mean": (None,), "clients": (counted,)})
    return replace(one, record=replace(one.record, metrics=(series,)))


def test_a_rate_that_ends_with_an_infinite_value_of_a_client_comes_last():
    # A record has no number for infinity. The mean over the other clients would be the best.
    measure = Measure("mean", "val", "val_ppl", "val", "val_ppl", "min")
    endless = with_series(fitted({"val_ppl": (1.0, 1.0, None, 1.0)}, mode="min"), "val", "val_ppl", 4.0)
    undefined = with_series(fitted({"val_ppl": (1.0, 1.0, None, 1.0)}, mode="min"), "val", "val_ppl", 3.0)
    other = fitted({"val_ppl": (2.0, 2.0, 2.0, 2.0)}, mode="min")
    for first, picked in ((endless, 0.5), (undefined, 0.1)):
        results = {Run("A", rate, seed): one for rate, one in ((0.1, first), (0.5, other)) for seed in PLAN.seeds}
        assert chosen_rates(PLAN, results, measure) == {"A": picked}
    results = {Run("A", None, 0): endless, Run("A", None, 1): other}
    plan = Plan(("A",), (None,), (0, 1))
    (row,) = summaries(plan, results, {"A": None}, replace(measure, selected_on=None))
    assert (row.mean.mean, row.worst.mean, row.repetitions, row.not_finite) == (2.0, 2.0, 2, 1)
    assert "A ends with values of clients that are not finite in 1 of 2 runs" in " ".join(
        notes(plan, [row], measure, {})[-1].split()
    )


def test_small_values_and_values_near_0_are_good_where_the_mode_says_so():
    results = {
        Run("A", rate, seed): fitted({"val_gap": (value, -value, value, -value)}, mode="abs")
        for rate, value in ((0.1, 0.3), (0.5, 0.2))
        for seed in PLAN.seeds
    }
    measure = Measure("mean", "val", "val_gap", "val", "val_gap", "abs")
    assert chosen_rates(PLAN, results, measure) == {"A": 0.5}
    losses = {
        run: fitted({"val_loss": tuple(abs(value) for value in values_of(one.record, "val", "val_gap")[1])}, mode="min")
        for run, one in results.items()
    }
    assert chosen_rates(PLAN, losses, Measure("mean", "val", "val_loss", "val", "val_loss", "min")) == {"A": 0.5}


def test_own_models_count_where_clients_have_them():
    one = fitted({"test_acc": (0.5, 0.5, 0.5, 0.5)})
    found = replace(one.record.evaluations[0], values={"test_acc": (0.5,) * 4, "personal/test_acc": (0.9,) * 4},
                    modes={"test_acc": "max", "personal/test_acc": "max"})  # fmt: skip
    assert summary_of(replace(one.record, evaluations=(found,)), "test", "test_acc", "max")["mean"] == 0.9


BOTH = {"val": {"val_loss": "min", "val_acc": "max"}, "test": {"test_loss": "min", "test_acc": "max"}}


def test_the_default_metric_is_the_first_where_large_values_are_good():
    assert measure_of(BOTH, True, None, None, "mean") == ACCURACY
    chosen = measure_of(BOTH, False, "val_loss", None, "worst_10")
    assert chosen == Measure("worst_10", None, "val_loss", "test", "test_loss", "min")
    same_name = {"val": {"personal/acc": "max", "acc": "max"}, "test": {"acc": "max"}}
    assert measure_of(same_name, True, None, None, "mean").metric == "acc"
    slashes = {"val": {"valid/acc": "max"}, "test": {"test/acc": "max", "valid/acc": "max"}}
    assert measure_of(slashes, True, None, None, "mean").metric == "test/acc"
    other_names = {"val": {"v": "max"}, "test": {"t": "max"}}
    assert measure_of(other_names, True, None, "t", "mean").metric == "t"


def test_rates_may_be_picked_by_a_loss_and_reported_by_an_accuracy():
    measure = measure_of(BOTH, True, "val_loss", "test_acc", "worst_10")
    worse = fitted({"val_loss": (0.1, 0.2, 0.3, 0.9), "test_acc": (0.9, 0.8, 0.7, 0.2)})
    better = fitted({"val_loss": (0.1, 0.2, 0.3, 0.4), "test_acc": (0.9, 0.8, 0.7, 0.6)})
    results = {Run("A", rate, seed): one for rate, one in ((0.1, worse), (0.5, better)) for seed in PLAN.seeds}
    assert chosen_rates(PLAN, results, measure) == {"A": 0.5}
    (row,) = summaries(PLAN, results, {"A": 0.5}, measure)
    assert (row.worst_10.mean, row.worst.mean, row.worst_client) == (pytest.approx(0.6), pytest.approx(0.6), "Dundee")
    assert row.angle.mean > 0
    text = runs_csv(PLAN, results, {"A": 0.5}, measure, {})
    found = next(iter(csv.DictReader(io.StringIO(text))))
    assert (float(found["val_worst_10"]), float(found["worst_10"])) == (pytest.approx(0.9), pytest.approx(0.2))
    # The metric of the same name is as good as in validation, whatever its name seems to say.
    said = {"val": {"val_score": "min"}, "test": {"test_score": "max"}}
    for test_metric in (None, "test_score"):
        measure = measure_of(said, True, "val_score", test_metric, "mean")
        assert (measure.mode, measure.picked_mode) == ("min", None)


def test_without_a_test_split_both_stages_are_validation():
    found = measure_of({"val": {"val_acc": "max"}}, True, None, None, "mean")
    assert (found.selected_on, found.reported_on, found.metric) == ("val", "val", "val_acc")


@pytest.mark.parametrize(
    ("metrics", "several", "metric", "words"),
    [
        (BOTH, True, "val_ac", "metric must be one of val_loss, val_acc, found 'val_ac': did you mean 'val_acc'"),
        ({"val": {"v": "max"}, "test": {"t": "max"}}, True, None, "test_metric must be one of t, .*'v', found None"),
        ({"test": {"test_acc": "max"}}, True, None, "the data must have a validation split to pick learning rates on"),
        ({}, False, None, "the data must have a validation split or a test split to report on"),
    ],
)
def test_data_and_metrics_that_do_not_suffice_are_refused(metrics, several, metric, words):
    with pytest.raises(ValueError, match=words):
        measure_of(metrics, several, metric, None, "mean")


def test_with_one_rate_the_test_split_is_enough():
    found = measure_of({"test": {"test_acc": "max"}}, False, None, None, "mean")
    assert (found.selected_on, found.reported_on, found.metric) == (None, "test", "test_acc")


def test_the_worst_client_is_that_of_the_mean_over_the_seeds():
    one, two = fitted({"test_acc": (0.2, 0.3, 0.9, 0.9)}), fitted({"test_acc": (0.5, 0.1, 0.9, None)})
    assert worst_client([one], ACCURACY) == "Aalborg"
    assert worst_client([one, two], ACCURACY) == "Braga"  # .2 against .35
    rows = summaries(
        Plan(("A",), (None,), (0, 1)), {Run("A", None, 0): one, Run("A", None, 1): two}, {"A": None}, ACCURACY
    )
    assert (rows[0].worst_client, rows[0].worst.mean) == ("Braga", pytest.approx(0.2))
    losses = fitted({"test_loss": (0.2, 0.3, 1.9, 0.9)}, mode="min")
    assert worst_client([losses], Measure("mean", None, "x", "test", "test_loss", "min")) == "Cluj"


def test_rates_are_picked_with_the_first_seeds_alone():
    plan = Plan(("A",), (0.1, 0.5), (0, 1, 2), tuning_seeds=1)
    results = runs("A", {0.1: [EVEN, UNEVEN, UNEVEN], 0.5: [UNEVEN, EVEN, EVEN]})
    assert chosen_rates(plan, results, ACCURACY) == {"A": 0.5}
    assert chosen_rates(replace(plan, tuning_seeds=2), results, ACCURACY) == {"A": 0.1}, "level, so the first"
    assert chosen_rates(replace(plan, tuning_seeds=None), results, ACCURACY) == {"A": 0.1}


def test_the_other_seeds_run_with_the_picked_rate_alone():
    plan = Plan(("A", "B"), (0.1, 0.5), (4, 5, 6), tuning_seeds=1)
    grid = [Run(method, rate, 4) for method in "AB" for rate in (0.1, 0.5)]
    assert list(plan.runs({})) == grid
    picked = {"A": 0.5, "B": 0.1}
    assert list(plan.runs(picked))[4:] == [Run(method, picked[method], seed) for seed in (5, 6) for method in "AB"]
    assert len(plan) == len(list(plan.runs(picked))) == 8
    assert len(list(plan.runs({"B": 0.1}))) == 6, "A has no rate"
    assert len(replace(plan, tuning_seeds=3)) == len(list(replace(plan, tuning_seeds=None).grid())) == 12
    assert len(replace(plan, learning_rates=(None,))) == len(list(replace(plan, learning_rates=(None,)).grid())) == 6
    with pytest.raises(ValueError, match="tuning_seeds must be at most the number of seeds, 3, found 4"):
        replace(plan, tuning_seeds=4)
