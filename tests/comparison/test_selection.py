# SPDX-License-Identifier: Apache-2.0
"""Which learning rate is picked, which metric counts, and which differences are marked, on records made by hand."""

from dataclasses import replace

import pytest
from made_records import ACCURACY, record, results_of, runs

from fl_lightning.comparison import Comparison
from fl_lightning.comparison.plan import Measure, Plan, Run, measure_of, picked_rates, seed_list
from fl_lightning.report import ClientValues, MetricSeries

EVEN, UNEVEN = (0.6, 0.6, 0.6, 0.6), (0.9, 0.9, 0.9, 0.1)
PLAN = Plan(("A",), (0.1, 0.5), (0, 1))


def test_the_rule_decides_between_a_better_mean_and_a_better_worst_tenth():
    results = runs("A", {0.1: [EVEN, EVEN], 0.5: [UNEVEN, UNEVEN]})
    assert picked_rates(PLAN, results, ACCURACY) == {"A": 0.5}  # .7 against .6
    assert picked_rates(PLAN, results, replace(ACCURACY, select="worst_10")) == {"A": 0.1}  # .1 against .6


def test_the_mean_over_the_seeds_counts_and_of_equals_the_first():
    one_good_seed = runs("A", {0.1: [EVEN, EVEN], 0.5: [(1.0,) * 4, (0.1,) * 4]})
    assert picked_rates(PLAN, one_good_seed, ACCURACY) == {"A": 0.1}
    assert picked_rates(PLAN, runs("A", {0.1: [EVEN, EVEN], 0.5: [EVEN, EVEN]}), ACCURACY) == {"A": 0.1}


def test_it_is_picked_on_validation_and_not_on_test():
    results = results_of(
        (Run("A", rate, seed), record({"val_acc": (val,) * 4, "test_acc": (test,) * 4}))
        for rate, val, test in ((0.1, 0.8, 0.2), (0.5, 0.7, 0.9))
        for seed in PLAN.seeds
    )
    assert picked_rates(PLAN, results, ACCURACY) == {"A": 0.1}


def test_a_rate_with_a_failed_or_endless_run_comes_last():
    results = runs("A", {0.1: [EVEN, EVEN], 0.5: [UNEVEN, UNEVEN]})
    del results[Run("A", 0.5, 1)]
    assert picked_rates(PLAN, results, ACCURACY) == {"A": 0.1}
    results[Run("A", 0.5, 1)] = record({"val_acc": (None,) * 4})  # diverged
    assert picked_rates(PLAN, results, ACCURACY) == {"A": 0.1}
    del results[Run("A", 0.1, 0)], results[Run("A", 0.1, 1)]
    assert picked_rates(PLAN, results, ACCURACY) == {"A": 0.5}
    assert picked_rates(PLAN, {}, ACCURACY) == {}


def with_series(one, stage, metric, counted):
    """A fit whose summary counts so many clients with a value."""
    series = MetricSeries(metric, stage, "min", (5,), {"mean": (None,), "clients": (counted,)})
    return replace(one, metrics=(series,))


def test_a_rate_that_ends_with_an_infinite_value_of_a_client_comes_last():
    # A record has no number for infinity. The mean over the other clients would be the best.
    measure = Measure("mean", "val", "val_ppl", "val", "val_ppl", "min")
    endless = with_series(record({"val_ppl": (1.0, 1.0, None, 1.0)}, mode="min"), "val", "val_ppl", 4.0)
    undefined = with_series(record({"val_ppl": (1.0, 1.0, None, 1.0)}, mode="min"), "val", "val_ppl", 3.0)
    other = record({"val_ppl": (2.0, 2.0, 2.0, 2.0)}, mode="min")
    for first, picked in ((endless, 0.5), (undefined, 0.1)):
        results = {Run("A", rate, seed): one for rate, one in ((0.1, first), (0.5, other)) for seed in PLAN.seeds}
        assert picked_rates(PLAN, results, measure) == {"A": picked}
    results = results_of({Run("A", None, 0): endless, Run("A", None, 1): other})
    found = Comparison(Plan(("A",), (None,), (0, 1)), results, {}, replace(measure, selected_on=None))
    (row,) = found.rows
    assert (row.mean.mean, row.worst.mean, row.repetitions, row.not_finite) == (2.0, 2.0, 2, 1)
    assert "A ends with values of clients that are not finite in 1 of 2 runs" in " ".join(str(found).split())


def test_values_near_0_are_good_where_the_mode_says_so():
    results = results_of(
        (Run("A", rate, seed), record({"val_gap": (-value, value, -value, value)}, mode="abs"))
        for rate, value in ((0.1, 0.3), (0.5, 0.2))
        for seed in PLAN.seeds
    )
    found = Comparison(PLAN, results, {}, Measure("mean", "val", "val_gap", "val", "val_gap", "abs"))
    assert found.learning_rates == {"A": 0.5}
    assert (found.rows[0].mean.mean, found.rows[0].worst.mean) == (pytest.approx(0.2), 0.2)


def test_own_models_count_where_clients_have_them():
    one = record({"test_acc": (0.5, 0.5, 0.5, 0.5)})
    own = replace(one.evaluations[0], values={"test_acc": (0.5,) * 4, "personal/test_acc": (0.9,) * 4},
                  modes={"test_acc": "max", "personal/test_acc": "max"})  # fmt: skip
    results = results_of({Run("A", None, 0): replace(one, evaluations=(own,))})
    (row,) = Comparison(Plan(("A",), (None,), (0,)), results, {}, ACCURACY).rows
    assert row.mean.mean == 0.9


BOTH = {"val": {"val_loss": "min", "val_acc": "max"}, "test": {"test_loss": "min", "test_acc": "max"}}


def measured(metrics, *options):
    """The measure of a fit with these metrics."""
    evaluations = [
        ClientValues(1, stage, (0,), (1,), dict.fromkeys(modes, (0.5,)), modes) for stage, modes in metrics.items()
    ]
    return measure_of(replace(record({}), evaluations=tuple(evaluations)), *options)


def test_the_default_metric_is_the_first_where_large_values_are_good():
    assert measured(BOTH, True, None, "mean") == ACCURACY
    chosen = measured(BOTH, False, "val_loss", "worst_10")
    assert chosen == Measure("worst_10", None, "val_loss", "test", "test_loss", "min")
    same_name = {"val": {"personal/acc": "max", "acc": "max"}, "test": {"acc": "max"}}
    assert measured(same_name, True, None, "mean").metric == "acc"
    slashes = {"val": {"valid/acc": "max"}, "test": {"test/acc": "max", "valid/acc": "max"}}
    assert measured(slashes, True, None, "mean").metric == "test/acc"
    assert measured(BOTH, False, "test_loss", "mean").metric == "test_loss"
    # The metric of the same name is as good as in validation, whatever its name seems to say.
    said = {"val": {"val_score": "min"}, "test": {"test_score": "max"}}
    assert measured(said, True, None, "mean").mode == "min"
    no_test = measured({"val": {"val_acc": "max"}}, True, None, "mean")
    assert (no_test.selected_on, no_test.reported_on, no_test.metric) == ("val", "val", "val_acc")
    one_rate = measured({"test": {"test_acc": "max"}}, False, None, "mean")
    assert (one_rate.selected_on, one_rate.reported_on, one_rate.metric) == (None, "test", "test_acc")


@pytest.mark.parametrize(
    ("metrics", "several", "metric", "words"),
    [
        (BOTH, True, "val_ac", "metric must be one of val_loss, val_acc, found 'val_ac': did you mean 'val_acc'"),
        (
            {"val": {"v": "max"}, "test": {"t": "max"}},
            True,
            None,
            "a test metric that belongs to 'v' by its name",
        ),
        (BOTH, True, "test_acc", "metric must be one of val_loss, val_acc, found 'test_acc'"),
        ({"test": {"test_acc": "max"}}, True, None, "the data must have a validation split to pick learning rates on"),
        ({}, False, None, "the data must have a validation split or a test split to report on"),
    ],
)
def test_data_and_metrics_that_do_not_suffice_are_refused(metrics, several, metric, words):
    with pytest.raises(ValueError, match=words):
        measured(metrics, several, metric, "mean")


def test_the_worst_client_is_that_of_the_mean_over_the_seeds():
    one, two = record({"test_acc": (0.2, 0.3, 0.9, 0.9)}), record({"test_acc": (0.5, 0.1, 0.9, None)})
    results = results_of({Run("A", None, 0): one, Run("A", None, 1): two})
    (row,) = Comparison(Plan(("A",), (None,), (0,)), {Run("A", None, 0): one}, {}, ACCURACY).rows
    assert row.worst_client == "Aalborg"
    (row,) = Comparison(Plan(("A",), (None,), (0, 1)), results, {}, ACCURACY).rows
    assert (row.worst_client, row.worst.mean) == ("Braga", pytest.approx(0.2))  # .2 against .35
    losses = {Run("A", None, 0): record({"test_loss": (0.2, 0.3, 1.9, 0.9)}, mode="min")}
    loss = Measure("mean", None, "x", "test", "test_loss", "min")
    assert Comparison(Plan(("A",), (None,), (0,)), losses, {}, loss).rows[0].worst_client == "Cluj"


def test_rates_are_picked_with_the_first_seeds_alone():
    plan = Plan(("A",), (0.1, 0.5), (0, 1, 2), tuning_seeds=1)
    results = runs("A", {0.1: [EVEN, UNEVEN, UNEVEN], 0.5: [UNEVEN, EVEN, EVEN]})
    assert picked_rates(plan, results, ACCURACY) == {"A": 0.5}
    assert picked_rates(replace(plan, tuning_seeds=2), results, ACCURACY) == {"A": 0.1}, "level, so the first"
    assert picked_rates(replace(plan, tuning_seeds=None), results, ACCURACY) == {"A": 0.1}


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


def test_seeds_are_how_many_or_which_and_no_more_than_a_thousand():
    assert seed_list(3) == (0, 1, 2)
    assert seed_list([2**60]) == (2**60,)
    for many in (2**60, range(1001)):
        with pytest.raises(ValueError, match=r"seeds must be at most 1,000 seeds, found 1,"):
            seed_list(many)
