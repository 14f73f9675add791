# SPDX-License-Identifier: Apache-2.0
"""A metric that is undefined for a client is NaN for it, left out of the summary, counted and named once."""

import math
import re
from pathlib import Path

import pytest
import torch
import torchmetrics
from support import Classifier, fresh, quiet_trainer
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric, MetricCollection, PearsonCorrCoef, R2Score, classification
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryConfusionMatrix,
    MulticlassAccuracy,
    MulticlassAveragePrecision,
)
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.nominal import CramersV

import fl_lightning as fl
from fl_lightning.lightning.module.undefined_metrics import UNDEFINED, Noticed

ONES, ZEROS = torch.ones(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
SCORES = torch.linspace(0.1, 0.9, 6)
GIVE = {
    "No negative samples in targets": (BinaryAUROC(), (SCORES, ONES)),
    "No positive samples in targets": (BinaryAUROC(), (SCORES, ZEROS)),
    "No positive samples found": (BinaryAveragePrecision(), (SCORES, ZEROS)),
    "Average precision score": (MulticlassAveragePrecision(3), (torch.eye(3).repeat(2, 1), ONES)),
    "The variance": (PearsonCorrCoef(), (torch.full((6,), 2.0), torch.full((6,), 3.0))),
    "More independent regressions": (R2Score(adjusted=8), (SCORES, SCORES + 0.1)),
    "Division by zero": (R2Score(adjusted=5), (SCORES, SCORES + 0.1)),
    r"\d+ NaN values": (BinaryConfusionMatrix(normalize="true"), (ONES, ONES)),
    "Unable to compute": (CramersV(num_classes=2), (torch.tensor([0, 1]), torch.tensor([0, 1]))),
    "The ``compute`` method": (MulticlassAccuracy(3), None),
}
"""How each listed warning begins, and a metric with data that give it."""
IN_RARE_CASES = (
    "LogAUC score",
    "At least two values",
    "Detected zero division",
    "SVD calculation",
    "Predictions and references",
)


def test_each_listed_warning_is_covered():
    assert [text for text in UNDEFINED if not text.startswith((*GIVE, *IN_RARE_CASES))] == []


@pytest.mark.skipif(not hasattr(torchmetrics.classification, "LogAUC"), reason="other words before torchmetrics 1.6")
def test_listed_warnings_are_those_of_torchmetrics():
    """Every text is in the installed version, word by word; what it fills in apart."""
    sources = [path.read_text() for path in Path(torchmetrics.__file__).parent.rglob("*.py")]
    code = re.sub(r"\"\s*f?\"", "", "\n".join(sources))
    for text in UNDEFINED:
        for part in re.split(r"\.\*|\\d\+", text):
            assert part.strip() in code, part


@pytest.mark.parametrize("begin", GIVE)
def test_metrics_that_give_the_warning_are_undefined(begin, recwarn):
    metric, data = GIVE[begin]
    metric.reset()
    noticed = Noticed()
    with noticed.installed():
        if data is not None:
            metric.update(*data)
        for _ in range(2):  # the second time Python would not show the warning again
            value, reason = noticed.computed(metric)
            assert value.isnan().all()
            assert re.match("|".join(UNDEFINED), reason), reason
            metric._computed = None
            with noticed.apart() as reasons:
                metric.compute()
            assert any(re.match(begin, text) for text in reasons)
    assert not recwarn.list


CURVES = sorted(
    name
    for name, kind in vars(classification).items()
    if isinstance(kind, type)
    and issubclass(
        kind,
        (
            classification.BinaryPrecisionRecallCurve,
            classification.MulticlassPrecisionRecallCurve,
            classification.MultilabelPrecisionRecallCurve,
        ),
    )
)
ARGUMENTS = {
    "FixedRecall": {"min_recall": 0.5},
    "FixedPrecision": {"min_precision": 0.5},
    "AtSpecificity": {"min_specificity": 0.5},
    "AtSensitivity": {"min_sensitivity": 0.5},
}


@pytest.mark.parametrize("samples", ["both", "positive", "negative"])
@pytest.mark.parametrize("name", CURVES)
def test_metrics_with_thresholds_are_undefined_where_those_without_are(name, samples):
    """They compute the same from counts, in which torchmetrics looks for no missing class."""
    options = dict(next((given for end, given in ARGUMENTS.items() if name.endswith(end)), {}))
    scores, truth = torch.rand(12, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    truth = {"both": truth, "positive": truth * 0 + 1, "negative": truth * 0}[samples]
    if name.startswith("Multiclass"):
        options["num_classes"] = 2
        scores = torch.stack([1 - scores, scores], 1)
    elif name.startswith("Multilabel"):
        options["num_labels"] = 2
        scores, truth = torch.stack([scores, 1 - scores], 1), torch.stack([truth, torch.arange(12) % 2], 1)
    reasons = []
    for thresholds in (None, 11):
        metric, noticed = getattr(classification, name)(thresholds=thresholds, **options), Noticed()
        metric.update(scores, truth)
        with noticed.installed():
            reasons.append(noticed.computed(metric)[1])
    plain, binned = reasons
    assert binned is not None or plain is None
    # Of several classes, curves of precision are NaN for the missing one and do not warn.
    assert plain is not None or binned is None or (samples == "positive" and name.startswith("Multiclass"))


def test_other_warnings_go_on():
    metric, noticed = MeanMetric(nan_strategy="warn"), Noticed()
    with noticed.installed(), noticed.apart() as reasons:
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
        self.log("r2", self.r2)
        self.log("in_step", binary_auroc(score, truth))
        self.binned.update(score, truth)
        self.log("binned", self.binned)
        self.log("batches", self.batches(score, truth))
        self.groups.update(score, truth)

    def on_validation_epoch_end(self):
        self.log_dict(self.late.compute())
        self.late.reset()
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
    assert len(ours) == 8
    assert any(
        re.match(r"auroc is undefined for client 1 \('chur'\) and 1 more \(No positive samples in", t) for t in ours
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
    assert record.values["binned_ap"].isnan().tolist() == [False, True, False]  # the last one is positive
    assert record.values["r2"].isnan().tolist() == [False, False, True]
    assert record.values["loss"].isfinite().all()
    assert results["fed/loss/undefined"] == 0
    assert again["fed/auroc/undefined"] == 2
