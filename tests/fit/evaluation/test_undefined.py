# SPDX-License-Identifier: Apache-2.0
"""A metric that is undefined for a client is NaN for it, left out of the summary, counted and named once."""

import math
import re

import pytest
import torch
from support import Classifier, fresh, quiet_trainer
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric, MetricCollection, R2Score, SumMetric
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryConfusionMatrix,
    BinaryPrecision,
    BinaryRecall,
    BinarySpecificity,
    MulticlassRecall,
)
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.nominal import CramersV

import fl_lightning as fl
from fl_lightning.lightning.undefined_metrics import MetricWarnings

ONES, SCORES = torch.ones(6, dtype=torch.int64), torch.linspace(0.1, 0.9, 6)
WARNED = {
    "More independent regressions": (R2Score(adjusted=8), (SCORES, SCORES + 0.1)),
    "Division by zero": (R2Score(adjusted=5), (SCORES, SCORES + 0.1)),
    r"\d+ NaN values": (BinaryConfusionMatrix(normalize="true"), (ONES, ONES)),
    "Unable to compute": (CramersV(num_classes=2), (torch.tensor([0, 1]), torch.tensor([0, 1]))),
    "The ``compute`` method": (SumMetric(), None),
}
"""How a warning begins, and a metric with data that give it, of whose state nobody knows anything."""


@pytest.mark.parametrize("begin", WARNED)
def test_what_torchmetrics_warns_of_while_it_computes_is_undefined(begin, recwarn):
    metric, data = WARNED[begin]
    metric.reset()
    noticed = MetricWarnings()
    with noticed.installed():
        if data is not None:
            metric.update(*data)
        for _ in range(2):  # the second time Python would not show the warning again
            value, reason = noticed.computed(metric)
            assert value.isnan().all()
            assert re.match(begin, reason), reason
    assert not recwarn.list
    assert noticed.reasons == []


def test_other_warnings_go_on():
    metric, noticed = MeanMetric(nan_strategy="warn"), MetricWarnings()
    with noticed.installed(), noticed.captured() as reasons:
        with pytest.warns(UserWarning, match="Encountered `nan` values"):
            metric.update(torch.tensor([1.0, math.nan]))
        assert noticed.computed(metric) == (1.0, None)
    assert reasons == []


class Scores(Classifier):
    """Scores class 0 against the others, in every way that people log."""

    def __init__(self):
        super().__init__()
        self.auroc, self.late, self.r2 = BinaryAUROC(), MetricCollection({"late": BinaryAUROC()}), R2Score()
        self.binned, self.batches = BinaryAUROC(thresholds=21), BinaryAUROC(thresholds=21)
        self.recall, self.macro, self.kept = BinaryRecall(), MulticlassRecall(3), {"recall": BinaryRecall()}
        self.groups = MetricCollection(
            {"auroc": BinaryAUROC(thresholds=5), "ap": BinaryAveragePrecision(thresholds=5)}, prefix="binned_"
        )

    def validation_step(self, batch, batch_idx):
        x, y = batch
        score, truth = self(x).softmax(1)[:, 0], (y == 0).long()
        self.auroc.update(score, truth)
        self.late.update(score, truth)
        self.r2.update(score, x[:, 0])
        self.log("loss", score.mean())
        self.log("auroc", self.auroc)
        for metric in (self.recall, self.kept["recall"]):
            metric.update(score, truth)
        self.log("recall", self.recall)
        self.macro.update(self(x)[:, :3], y)
        self.log("macro", self.macro)
        self.log("r2", self.r2)
        self.log("in_step", binary_auroc(score, truth))
        self.binned.update(score, truth)
        self.log("binned", self.binned)
        self.log("batches", self.batches(score, truth))
        self.groups.update(score, truth)

    def on_validation_epoch_end(self):
        self.log_dict(self.late.compute())
        self.late.reset()
        self.log("missed", 1 - self.kept["recall"].compute())
        self.kept["recall"].reset()
        self.log_dict(self.groups.compute())
        self.groups.reset()


def hospitals(sizes=(20, 20, 1), name="hospital"):
    """Three of them: the second has no positive patient, the last has one patient."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(sizes), 12, generator=generator)
    y = torch.cat([torch.arange(sizes[0]) % 2, torch.ones(sizes[1]).long(), torch.zeros(sizes[2]).long()])
    data = TensorDataset(x, y)
    setattr(data, name, [n for n, size in zip(("basel", "chur", "davos"), sizes, strict=True) for _ in range(size)])
    return data


@pytest.mark.filterwarnings("default")
def test_a_hospital_with_one_class_has_no_auroc(recwarn):
    data = fl.FederatedDataModule(
        hospitals(), fl.data.ByKey("hospital"), val=hospitals(), eval_batch_size=20, evaluation="independent"
    )
    strategy = fl.FederatedStrategy()
    trainer = quiet_trainer(strategy)
    (results,) = trainer.validate(fresh(Scores), data, verbose=False)
    (again,) = trainer.validate(fresh(Scores), data, verbose=False)
    ours = [str(w.message) for w in recwarn if " is undefined for client " in str(w.message)]
    assert len(ours) == 10
    assert any(
        re.match(r"auroc is undefined for client 1 \('chur'\) \(No positive samples in .*\) and 1 more:", t)
        for t in ours
    )
    assert any(re.match(r"r2 is undefined for client 2 \('davos'\) \(ValueError: Needs at least two", t) for t in ours)
    record = strategy.last_evaluation
    assert record.client_names == ("basel", "chur", "davos")
    true = float(record.values["auroc"][0])
    assert 0 < true < 1
    for name in ("auroc", "late", "in_step"):
        assert record.values[name].isnan().tolist() == [False, True, True], name
        assert set(record.undefined[name]) == {1, 2}
        assert results[f"fed/{name}/undefined"] == 2
        assert results[f"fed/{name}/clients"] == 1
        for key in ("mean", "worst_5", "min"):
            assert results[f"fed/{name}/{key}"] == pytest.approx(true)
        assert results[f"fed/{name}/angle"] == 0
    for name in ("binned", "batches", "binned_auroc"):
        assert record.values[name].isnan().tolist() == [False, True, True], name
    for name in ("binned_ap", "recall", "missed"):
        assert record.values[name].isnan().tolist() == [False, True, False], name  # the last one is positive
    assert record.values["r2"].isnan().tolist() == [False, False, True]
    assert record.values["loss"].isfinite().all()
    assert record.values["macro"].isfinite().all()  # over the classes that a client has
    assert results["fed/loss/undefined"] == 0
    assert again["fed/auroc/undefined"] == 2


class Batches(Classifier):
    """Logs what ``forward`` gives for each batch, of one metric and of a collection."""

    def __init__(self):
        super().__init__()
        self.recall, self.both = BinaryRecall(), MetricCollection([BinaryPrecision(), BinarySpecificity()])

    def validation_step(self, batch, batch_idx):
        predicted, truth = (batch[0][:, 0] > 0).long(), (batch[1] == 0).long()
        self.log("recall", self.recall(predicted, truth))
        self.log_dict(self.both(predicted, truth))


@pytest.mark.filterwarnings("ignore:.* is undefined for client")
def test_four_hospitals_of_which_one_has_no_positive_patient():
    """Their values of batches, and their angle: three are all right, and one has no say."""
    y = torch.tensor([0, 1, 0, 1, 0, 1, 1, 1, 0, 0])
    x = torch.zeros(10, 12)
    x[:, 0] = torch.where(y == 0, 1.0, -1.0)
    data = TensorDataset(x, y)
    data.hospital = ["a", "a", "b", "b", "c", "c", "chur", "chur", "d", "d"]
    strategy = fl.FederatedStrategy()
    split = fl.FederatedDataModule(
        data, fl.data.ByKey("hospital"), val=data, eval_batch_size=2, evaluation="independent"
    )
    (results,) = quiet_trainer(strategy).validate(fresh(Batches), split, verbose=False)
    undefined = {name: set(reasons) for name, reasons in strategy.last_evaluation.undefined.items()}
    chur, d = (strategy.last_evaluation.client_names.index(name) for name in ("chur", "d"))
    assert undefined == {"recall": {chur}, "BinaryPrecision": {chur}, "BinarySpecificity": {d}}
    for summary, value in {"mean": 1.0, "worst_5": 1.0, "angle": 0.0, "undefined": 1.0, "clients": 4.0}.items():
        assert results[f"fed/recall/{summary}"] == pytest.approx(value, abs=1e-6)
