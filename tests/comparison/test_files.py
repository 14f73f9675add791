# SPDX-License-Identifier: Apache-2.0
"""Files of finished runs, and one record of clients that were alone."""

from dataclasses import replace

import pytest
from made_records import record

from fl_lightning.comparison.bounds import merged
from fl_lightning.comparison.files import check_configuration, read_run, write_run
from fl_lightning.report import ClientValues, FitRecord, MetricSeries
from fl_lightning.report.conclusion import lede
from fl_lightning.report.runs_of_a_method import by_method, count_infinite
from fl_lightning.report.tables import comparison


def alone(*rounds):
    """A client's fit with accuracies by round."""
    evaluations = [
        ClientValues(number, "val", (0,), (7,), {"val_acc": (value,)}, {"val_acc": "max"}) for number, value in rounds
    ]
    return FitRecord("FedAvg", client_names=("0",), client_sizes=(5,), evaluations=tuple(evaluations))


def test_a_client_that_stopped_early_keeps_its_last_value():
    first = replace(alone((1, 0.1), (2, 0.2), (3, 0.3)), rounds=record({}, conflicts=(1, 1, 1), seconds=6.0).rounds)
    second = replace(alone((1, 0.5), (2, 0.4)), rounds=record({}, conflicts=(0, 0), seconds=1.0).rounds)
    found = merged({0: first, 2: second}, ("a", "b", "c"), (5, 0, 9))
    assert [(v.round, v.client_ids, v.values["val_acc"]) for v in found.evaluations] == [
        (1, (0, 2), (0.1, 0.5)), (2, (0, 2), (0.2, 0.4)), (3, (0, 2), (0.3, 0.4)),
    ]  # fmt: skip
    assert (found.client_names, found.client_sizes) == (("a", "b", "c"), (5, 0, 9))
    (series,) = found.metrics
    assert series.summaries["mean"] == pytest.approx((0.3, 0.3, 0.35))
    assert found.rounds.training_seconds == (2.5, 2.5, 2.0)
    assert found.rounds.conflicts == (0, 0, 0)


def test_an_infinite_value_of_a_client_alone_stays_one():
    endless = alone((1, None))
    counted = MetricSeries("val_acc", "val", "max", (1,), {"mean": (None,), "clients": (1.0,)})
    fits = {0: replace(endless, metrics=(counted,)), 1: alone((1, 0.5)), 2: alone((1, None))}
    found = merged(fits, ("a", "b", "c"), (5, 5, 5))
    assert found.last_values("val").values["val_acc"] == (None, 0.5, None)
    assert count_infinite(found, found.last_values("val"), "val_acc") == 1
    # Nor does a report call another client the worst off.
    methods = by_method([found])
    first, second = lede(methods, "val", comparison(methods, "val"))
    assert first == "With \u2068FedAvg\u2069, a run ends with clients whose val_acc is not finite."
    assert second == "No number below counts that run, so they cannot say who is worst off."


def test_a_file_comes_back_as_it_was_written_or_not_at_all(tmp_path):
    one, file = record({"val_acc": (0.1, 1 / 3, None, 1e-17)}, conflicts=(1, 2), seconds=1.1), tmp_path / "run.json"
    assert read_run(file) is None
    write_run(file, one)
    assert read_run(file) == one
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    file.write_text(file.read_text()[:100])
    with pytest.raises(
        ValueError, match=r"run.json must be the record of a fit \(.*\): if a comparison wrote it, delete it"
    ):
        read_run(file)


def test_a_damaged_configuration_is_named(tmp_path):
    (tmp_path / "configuration.json").write_text('{"the project": ')
    with pytest.raises(ValueError, match=r"configuration.json cannot be read \(.*\): take another folder, or delete"):
        check_configuration(tmp_path, {})
