# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from records import evaluation_of, fit_record, round_of

from fl_lightning.report import ClientValues, FitRecord, record_from_json, record_to_json
from fl_lightning.report.record_builder import RecordBuilder, plain_json


def test_json_gives_the_record_back():
    record = fit_record(clients=5, rounds=20, status="interrupted", is_bound=True)
    text = record_to_json(record)
    assert record_from_json(text) == record
    assert record_to_json(record_from_json(text)) == text
    assert "NaN" not in text
    assert text.startswith('{"method":"FedAvg","seed":')
    filled = {entry.name for entry in fields(FitRecord) if getattr(record, entry.name)}
    assert filled == {entry.name for entry in fields(FitRecord)} - {"seed", "division"}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda r: r.update(version=2), ValueError, "must have version 1, found 2"),
        (lambda r: r.pop("rounds"), ValueError, "FitRecord must be an object with the keys"),
        (lambda r: r.update(more=1), ValueError, "FitRecord must be an object with the keys"),
        (lambda r: r["rounds"].pop("round"), ValueError, "RoundSeries must be an object with the keys"),
        (lambda r: r["rounds"]["round"].pop(), ValueError, "round and clients of RoundSeries must be equally"),
        (lambda r: r.update(seed="zero"), TypeError, "seed of FitRecord must be None or an integer, found 'zero'"),
        (lambda r: r.update(status="over"), ValueError, "status of FitRecord must be"),
        (lambda r: r["client_sizes"].append(-1), ValueError, r"client_sizes\[4\] of FitRecord must be an int"),
        (lambda r: r["evaluations"][0]["modes"].clear(), ValueError, "modes of ClientValues must name"),
        (lambda r: r["class_counts"][2].pop(), ValueError, r"class_names and class_counts\[2\] of FitRecord must be"),
    ],
)  # fmt: skip
def test_a_record_of_another_form_is_refused(change, error, message):
    found = json.loads(record_to_json(fit_record()))
    change(found)
    with pytest.raises(error, match=message):
        record_from_json(json.dumps(found))


def test_what_is_no_record_is_refused():
    for text in ("[]", "3", "{}"):
        with pytest.raises(ValueError, match="must have version 1, found None"):
            record_from_json(text)
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        record_to_json(FitRecord("FedAvg", settings={"q": float("nan")}))
    assert plain_json({"a": [float("inf"), 1.0], "b": None}) == {"a": ["inf", 1.0], "b": None}


def test_values_of_an_evaluation_and_the_last_of_a_stage():
    values = ClientValues.of(evaluation_of(3, 4))
    assert values.sizes == (10, 11, 12, 13)
    assert values.modes == {"val_acc": "max", "val_loss": "min"}
    record = fit_record(test=False)
    assert record.last_values() == record.last_values("val") == record.evaluations[-1]
    assert record.last_values("test") is None
    assert fit_record().last_values().stage == "test"
    undefined = replace(evaluation_of(3, 2), values={"auroc": torch.tensor([float("nan"), 0.5])})
    assert ClientValues.of(undefined).values == {"auroc": (None, 0.5)}


def test_summaries_are_those_of_the_evaluations():
    record = fit_record(clients=20, rounds=6)
    series = next(s for s in record.metrics if (s.stage, s.metric) == ("val", "val_acc"))
    assert series.rounds == (1, 2, 3, 4, 5, 6)
    values = torch.tensor(record.last_values("val").values["val_acc"])
    assert series.summaries["mean"][-1] == pytest.approx(float(values.mean()))
    assert series.summaries["worst_10"][-1] == pytest.approx(float(values.sort().values[:2].mean()))
    assert series.summaries["undefined"] == (0.0,) * 6
    builder = RecordBuilder(record)
    builder.add_evaluation(evaluation_of(6, 20))
    assert [found.rounds for found in builder.record().metrics if found.stage == "val"] == [series.rounds] * 2


def test_clients_values_are_thinned_out_and_the_first_and_last_stay():
    builder = RecordBuilder(FitRecord("FedAvg", client_names=("a",) * 1000, client_sizes=(1,) * 1000))
    for number in range(1, 101):
        builder.add_evaluation(evaluation_of(number, 1000))
        evaluations = builder.record().evaluations
        kept = [values.round for values in evaluations]
        assert kept[0] == 1
        assert kept[-1] == number
        assert sum(len(v.client_ids) * 4 for v in evaluations) <= 200_000
    assert len(kept) > 10
    assert len({b - a for a, b in pairwise(kept[:-1])}) == 1  # even distances
    assert len(builder.record().metrics[0].rounds) == 100  # summaries stay whole


def test_a_builder_goes_on_with_a_record():
    whole, first = RecordBuilder(FitRecord("FedAvg")), RecordBuilder(FitRecord("FedAvg"))
    for index in range(900):
        whole.add_round(round_of(index, (0, 1)))
        if index < 450:
            first.add_round(round_of(index, (0, 1)))
    second = RecordBuilder(record_from_json(record_to_json(first.record())))
    for index in range(450, 900):
        second.add_round(round_of(index, (0, 1)))
    assert second.record() == whole.record()


def test_a_repeated_round_replaces_what_an_interrupted_run_left():
    builder, once = RecordBuilder(fit_record(rounds=8, test=False)), RecordBuilder(fit_record(rounds=5, test=False))
    for number in (5, 6):
        for made in (builder, once):
            made.add_round(round_of(number, (0, 1), seed=3))
            assert {series.rounds[-1] for series in made.record().metrics} == {number}  # none of the dropped rounds
            made.add_evaluation(evaluation_of(number + 1, 4, seed=3))
    assert builder.record().rounds == once.record().rounds
    assert builder.record().metrics == once.record().metrics
    assert builder.record().evaluations == once.record().evaluations


def test_reasons_are_grouped_and_bounded():
    builder = RecordBuilder(FitRecord("FedAvg", client_names=("a",) * 60, client_sizes=(1,) * 60))
    for index in range(60):
        builder.add_round(round_of(index, (0,), dropped={1: "dropped out", index: f"reason {index}"}))
    absences = builder.record().absences
    out = next(entry for entry in absences if entry.reason == "dropped out")
    assert (out.count, out.first_round, out.last_round, out.client_ids) == (59, 0, 59, (1,))  # round 1: another reason
    assert len(absences) == 41
    rest = next(entry for entry in absences if entry.reason == "other reasons")
    assert len(rest.client_ids) == 20
    assert sum(entry.count for entry in absences) == 119


def test_what_is_not_finite_is_none():
    builder = RecordBuilder(FitRecord("FedAvg"))
    builder.add_round(replace(round_of(0, (0,)), train_loss=float("nan")))
    record = builder.record()
    assert record.rounds.train_loss == (None,)
    assert record_from_json(record_to_json(record)) == record


def test_clients_that_are_only_evaluated_are_known_by_name():
    builder = RecordBuilder(FitRecord("FedAvg", client_names=("a", "b"), client_sizes=(5, 6)))
    builder.add_evaluation(evaluation_of(1, 4, names=("a", "b", "c", "d")))
    assert builder.record().client_names == ("a", "b", "c", "d")
    assert builder.record().client_sizes == (5, 6, 0, 0)


def test_marks_follow_clients_to_the_numbers_that_they_have_later():
    builder = RecordBuilder(FitRecord("FedAvg", client_names=("basel", "chur"), client_sizes=(1, 1)))
    builder.add_evaluation(replace(evaluation_of(1, 2, names=("basel", "chur")), one_class={"val_acc": (1,)}))
    builder.go_on(("chur", "davos"), (1, 1))
    record = builder.record()
    assert (record.client_names, record.evaluations[0].one_class) == (("chur", "davos", "basel"), {"val_acc": (0,)})
