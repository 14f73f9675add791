# SPDX-License-Identifier: Apache-2.0
"""What clients' values are where torchmetrics makes numbers up, against scikit-learn with ``zero_division=nan``.

Where scikit-learn has no such option, against the definition with NaN for 0/0.
"""

import inspect
import itertools
import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torchmetrics import classification
from torchmetrics.wrappers import BootStrapper, ClasswiseWrapper, MinMaxMetric

import fl_lightning as fl
from fl_lightning.lightning.undefined_metrics import MetricWarnings, undefined

EVEN = torch.tensor([0, 1, 0, 1, 1, 0])
MIXED = torch.tensor([0, 1, 1, 1, 0, 0])
ONES, ZEROS = torch.ones_like(EVEN), torch.zeros_like(EVEN)
BINARY = {
    "both": (MIXED, EVEN), "no positives": (MIXED, ZEROS), "no negatives": (MIXED, ONES),
    "none predicted": (ZEROS, EVEN), "all predicted": (ONES, EVEN), "all right, negative": (ZEROS, ZEROS),
    "all right, positive": (ONES, ONES), "all wrong": (ONES, ZEROS), "one sample": (ONES[:1], ONES[:1]),
}  # fmt: skip
MULTICLASS = {
    "all": (torch.tensor([0, 1, 2, 2, 1, 0]), torch.tensor([0, 1, 2, 0, 1, 2])), "one right": (ONES, ONES),
    "one, partly right": (torch.tensor([1, 1, 0, 1, 2, 1]), ONES), "one wrong": (ZEROS, ONES),
    "two of three": (torch.tensor([0, 1, 1, 1, 2, 0]), EVEN), "one sample": (ONES[:1], ONES[:1]),
    "a class never predicted": (MIXED, torch.tensor([0, 1, 2, 1, 2, 0])),
}  # fmt: skip
MULTILABEL = {
    name: (torch.stack([MIXED, *preds], 1), torch.stack([EVEN, *truth], 1))
    for name, preds, truth in (
        ("all", (EVEN, MIXED), (MIXED, EVEN)), ("no positives", (EVEN, MIXED), (ZEROS, EVEN)),
        ("no negatives", (EVEN, ZEROS), (ONES, EVEN)), ("never", (ZEROS, ONES), (ZEROS, ONES)),
    )
}  # fmt: skip
CASES = {"Binary": BINARY, "Multiclass": MULTICLASS, "Multilabel": MULTILABEL}
RATES = {
    "Precision": lambda tp, fp, tn, fn: (tp, tp + fp),
    "Recall": lambda tp, fp, tn, fn: (tp, tp + fn),
    "Specificity": lambda tp, fp, tn, fn: (tn, tn + fp),
    "NegativePredictiveValue": lambda tp, fp, tn, fn: (tn, tn + fn),
    "F1Score": lambda tp, fp, tn, fn: (2 * tp, 2 * tp + fp + fn),
    "FBetaScore": lambda tp, fp, tn, fn: (5 * tp, 5 * tp + fp + 4 * fn),
    "JaccardIndex": lambda tp, fp, tn, fn: (tp, tp + fp + fn),
    "Accuracy": lambda tp, fp, tn, fn: (tp + tn, tp + fp + tn + fn),
    "HammingDistance": lambda tp, fp, tn, fn: (fp + fn, tp + fp + tn + fn),
}
OF_RECALL = {"Accuracy": RATES["Recall"], "HammingDistance": lambda tp, fp, tn, fn: (fn, tp + fn)}
SCIKIT = {
    "Precision": sk.precision_score, "Recall": sk.recall_score, "F1Score": sk.f1_score,
    "FBetaScore": lambda y, p, **options: sk.fbeta_score(y, p, beta=2, **options),
}  # fmt: skip
"""Those that know ``zero_division=nan``."""
CURVES = {
    "AveragePrecision": sk.average_precision_score, "AUROC": sk.roc_auc_score,
    "PrecisionAtFixedRecall": None, "RecallAtFixedPrecision": None, "SensitivityAtSpecificity": None,
    "SpecificityAtSensitivity": None, "EER": None, "LogAUC": None, "ROC": None, "PrecisionRecallCurve": None,
}  # fmt: skip
"""``None``: only which of them are undefined is known."""
CHANCE = {"MatthewsCorrCoef": sk.matthews_corrcoef, "CohenKappa": sk.cohen_kappa_score}
OF_POSITIVES = ("AveragePrecision", "PrecisionAtFixedRecall", "RecallAtFixedPrecision", "PrecisionRecallCurve")
WITHOUT = {
    "CalibrationError", "HingeLoss", "ExactMatch", "RankingAveragePrecision", "RankingLoss", "CoverageError",
    "StatScores", "ConfusionMatrix", "GroupStatRates", "Fairness",
}  # fmt: skip
"""Their values are theirs: numbers of conventions, several ones, or NaN already."""
OPTIONS = {
    "FBetaScore": {"beta": 2.0}, "PrecisionAtFixedRecall": {"min_recall": 0.5},
    "RecallAtFixedPrecision": {"min_precision": 0.5}, "SensitivityAtSpecificity": {"min_specificity": 0.5},
    "SpecificityAtSensitivity": {"min_sensitivity": 0.5},
}  # fmt: skip
KINDS = sorted(name for name in classification.__all__ if name.startswith(tuple(CASES)))


def split(name):
    task = next(task for task in CASES if name.startswith(task))
    return task, name.removeprefix(task)


def made(name, **options):
    task, kind = split(name)
    size = {"Binary": {}, "Multiclass": {"num_classes": 3}, "Multilabel": {"num_labels": 3}}[task]
    return getattr(classification, name)(**size, **OPTIONS.get(kind, {}), **options)


def averages(name):
    _, kind = split(name)
    if name.startswith("Binary") or "average" not in inspect.signature(getattr(classification, name)).parameters:
        return ["only"]
    return ["macro", None, *(["micro", "weighted"] if kind in RATES else ["weighted"] if CURVES[kind] else [])]


def judged(metric, *given, **options):
    noticed = MetricWarnings()
    with noticed.installed():
        metric.update(*given, **options)
        return noticed.computed(metric)


def ratio(pair):
    above, below = pair
    return above / below if below else math.nan


def mean_of(values, weights):
    """scikit-learn's, of values some of which are NaN."""
    known = ~np.isnan(values)
    if not known.any():
        return math.nan
    return np.average(values[known], weights=weights[known] if weights[known].any() else None)


def by_definition(kind, task, average, preds, truth):
    classes = range(3) if task == "Multiclass" else [1]
    columns = [(preds, truth)] if preds.ndim == 1 else list(zip(preds.T, truth.T, strict=True))
    pairs = [(p == c, y == c) for p, y in columns for c in classes]
    counts = np.array([[(p & y).sum(), (p & ~y).sum(), (~p & ~y).sum(), (~p & y).sum()] for p, y in pairs])
    rate = OF_RECALL.get(kind, RATES[kind]) if task == "Multiclass" else RATES[kind]
    if average in ("only", "micro"):
        return ratio(rate(*counts.sum(0)))
    values = np.array([ratio(rate(*each)) for each in counts])
    if average is None:
        return values
    if task == "Multiclass":  # torchmetrics takes classes that are in neither for no classes
        values[counts[:, [0, 1, 3]].sum(1) == 0] = math.nan
    return mean_of(values, counts[:, 0] + counts[:, 3] if average == "weighted" else np.ones(len(values)))


def by_scikit(kind, task, average, preds, truth):
    options = {"zero_division": np.nan, "average": {"only": "binary"}.get(average, average)}
    if task == "Multiclass":
        options["labels"] = range(3)
    return SCIKIT[kind](truth, preds, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in KINDS if split(name)[1] in RATES])
def test_rates_are_those_of_scikit_learn(name):
    task, kind = split(name)
    undefined = 0
    for average in averages(name):
        for case, (preds, truth) in CASES[task].items():
            value, reason = judged(made(name, **({} if average == "only" else {"average": average})), preds, truth)
            expected = by_definition(kind, task, average, preds.numpy(), truth.numpy())
            assert value.numpy() == pytest.approx(expected, nan_ok=True, abs=1e-6), (average, case)
            if kind in SCIKIT:
                theirs = by_scikit(kind, task, average, preds.numpy(), truth.numpy())
                assert theirs == pytest.approx(expected, nan_ok=True), (average, case)
            assert (reason is not None) == bool(value.isnan().any())
            undefined += int(value.isnan().any())
    assert undefined or (kind in OF_RECALL and task != "Multiclass")


def curve(kind, positive, scores):
    if not positive.any() or (positive.all() and kind not in OF_POSITIVES):
        return math.nan
    return CURVES[kind](positive, scores) if CURVES[kind] else 0.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("thresholds", [None, 101])
@pytest.mark.parametrize("name", [name for name in KINDS if split(name)[1] in CURVES])
def test_curves_need_every_class(name, thresholds):
    """As in scikit-learn, an average over classes of which one has no value has none."""
    task, kind = split(name)
    for average, (case, (_, truth)) in itertools.product(averages(name), CASES[task].items()):
        scores = torch.arange(1, 1 + len(truth)) / 10 + 0.003
        if task != "Binary":
            scores = torch.stack([scores, 0.9 - scores, torch.full_like(scores, 0.1)], 1)
        options = {} if average == "only" else {"average": average}
        value, reason = judged(made(name, thresholds=thresholds, **options), scores, truth)
        labels = [truth == c for c in range(3)] if task == "Multiclass" else truth.reshape(len(truth), -1).T == 1
        pairs = zip(labels, scores.reshape(len(truth), -1).T, strict=True)
        each = np.array([curve(kind, label.numpy(), score.numpy()) for label, score in pairs])
        assert (reason is not None) == bool(np.isnan(each).any()), (average, case, reason)
        if CURVES[kind]:
            weights = [int(label.sum()) for label in labels] if average == "weighted" else None
            expected = each if average is None else np.average(each, weights=weights)
            assert value.numpy() == pytest.approx(expected, nan_ok=True, abs=1e-6), (average, case)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("thresholds", [None, 101])
def test_averages_leave_an_ignored_class_out(thresholds):
    scores, truth = torch.rand(30, 3, generator=torch.Generator().manual_seed(0)).softmax(1), torch.arange(30) % 3
    kept, options = truth > 0, {"ignore_index": 0}
    each = [sk.roc_auc_score(truth[kept] == c, scores[kept, c]) for c in (1, 2)]
    value, reason = judged(made("MulticlassAUROC", thresholds=thresholds, **options), scores, truth)
    assert (float(value), reason) == (pytest.approx(np.mean(each), abs=0.02 if thresholds else 1e-6), None)
    value, reason = judged(made("MulticlassRecall", **options), scores, truth)
    assert float(value) == pytest.approx(sk.recall_score(truth, scores.argmax(1), labels=[1, 2], average="macro"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in KINDS if split(name)[1] in CHANCE])
def test_correlations_of_labels_need_two_classes(name):
    """Matthews' on both sides, and Cohen's on one."""
    task, kind = split(name)
    for case, pair in CASES[task].items():
        value, reason = judged(made(name), *pair)
        flat = [some.flatten().numpy() for some in pair]
        varies = all(
            len(set(some.tolist())) > 1 for some in (flat if kind == "MatthewsCorrCoef" else [np.concatenate(flat)])
        )
        expected = CHANCE[kind](*flat) if varies else math.nan
        assert float(value) == pytest.approx(expected, nan_ok=True, abs=1e-6), case
        assert (reason is None) == (varies or kind == "CohenKappa")


def test_every_classification_metric_is_looked_at():
    assert {split(name)[1] for name in KINDS} <= {*RATES, *CURVES, *CHANCE, *WITHOUT}


@pytest.mark.filterwarnings("ignore")
def test_inside_wrappers():
    recall = classification.BinaryRecall
    for wrapper in (
        BootStrapper(recall()),
        MinMaxMetric(recall()),
        1 - recall(),
        recall() + classification.BinaryPrecision(),
    ):
        value, _ = judged(wrapper, MIXED, ZEROS)
        assert (
            all(v.isnan() for k, v in value.items() if k in ("mean", "raw"))
            if isinstance(value, dict)
            else value.isnan()
        )
    value, _ = judged(ClasswiseWrapper(classification.MulticlassRecall(3, average=None), prefix=""), MIXED, EVEN)
    assert [float(v) for v in value.values()] == pytest.approx([2 / 3, 2 / 3, math.nan], nan_ok=True)
    groups = torch.tensor([1, 0, 2, 0, 1, 2])  # the last one has no positive sample
    assert judged(fl.metrics.ByGroup(recall(), 3), ONES, EVEN, groups=groups) == (0, None)
    value, reason = judged(
        fl.metrics.ByGroup(recall(), 2), ONES[groups != 0], EVEN[groups != 0], groups=groups[groups != 0] - 1
    )
    assert value.isnan()
    assert reason == "No positive samples in targets"


def test_values_of_single_samples_are_not_judged():
    assert undefined(classification.BinaryAccuracy(multidim_average="samplewise")) is None


@pytest.mark.parametrize("kind", [classification.MulticlassAUROC, classification.MulticlassJaccardIndex])
def test_an_ignored_label_beyond_the_classes_leaves_none_out(kind):
    metric = kind(3, ignore_index=3)
    metric.update(torch.eye(4)[:, :3].softmax(1), torch.arange(4))
    assert not undefined(metric).where.any()
    assert not undefined(metric).absent.any()


def test_a_curve_of_all_labels_together_needs_one_positive_sample():
    metric = classification.MultilabelAUROC(2, average="micro")
    metric.update(torch.rand(3, 2), torch.tensor([[1, 0], [0, 0], [0, 0]]))
    assert undefined(metric).where.tolist() is False
