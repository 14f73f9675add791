# SPDX-License-Identifier: Apache-2.0
"""What metrics accumulate, taken out and joined; the contract with torchmetrics."""

import pytest
import torch
from support import fit
from torchmetrics import MeanMetric, RunningMean
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryCohenKappa,
    BinaryF1Score,
    BinaryMatthewsCorrCoef,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassRecall,
)
from torchmetrics.regression import MeanSquaredError
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, MultioutputWrapper, MultitaskWrapper

import fl_lightning as fl
from fl_lightning.lightning import loop_parts, metric_state
from fl_lightning.lightning.metric_state import (
    MetricDelta,
    MetricState,
    gives_one_class,
    is_mergeable,
    joins_clients,
    updates_of,
)

SCORES, TRUTH = torch.rand(12, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
GROUPS = torch.arange(12) // 3 % 2
HOLDERS = {
    "ByGroup": lambda: fl.metrics.ByGroup(BinaryAUROC()),
    "ClasswiseWrapper": lambda: ClasswiseWrapper(MulticlassRecall(2, average=None)),
    "MultioutputWrapper": lambda: MultioutputWrapper(MeanSquaredError(), 2),
    "MultitaskWrapper": lambda: MultitaskWrapper({"a": BinaryAccuracy(), "b": fl.metrics.ByGroup(BinaryAccuracy())}),
}


def give(metric, at):
    if isinstance(metric, fl.metrics.ByGroup):
        metric.update(SCORES[at], TRUTH[at], groups=GROUPS[at])
    elif isinstance(metric, MultitaskWrapper):
        give(metric.task_metrics["a"], at)
        give(metric.task_metrics["b"], at)
    elif isinstance(metric, MultioutputWrapper):
        metric.update(torch.stack([SCORES, SCORES * 2], 1)[at], torch.stack([TRUTH, TRUTH], 1)[at].float())
    else:
        metric.update((SCORES[at] > 0.5).long() if isinstance(metric, ClasswiseWrapper) else SCORES[at], TRUTH[at])


@pytest.mark.parametrize("name", HOLDERS)
def test_what_clients_add_to_wrappers_without_states_is_joined(name):
    metric, whole, clients = HOLDERS[name](), HOLDERS[name](), (slice(0, 5), slice(5, 12))
    assert joins_clients(metric)
    deltas = []
    for at in clients:
        before = MetricState(metric)
        metric.reset()
        give(metric, at)
        deltas.append(MetricDelta.of(metric))
        before.restore()
    assert updates_of(metric) == 0
    for delta in deltas:
        delta.add_to(metric)
    for at in clients:
        give(whole, at)
    assert updates_of(metric) == updates_of(whole) > 0
    torch.testing.assert_close(metric.compute(), whole.compute(), rtol=0, atol=0)


COUNTS = (
    BinaryAccuracy(), BinaryF1Score(), BinaryMatthewsCorrCoef(), BinaryCohenKappa(), MulticlassAccuracy(3),
    MulticlassRecall(3, average=None), MulticlassConfusionMatrix(3),
)  # fmt: skip


@pytest.mark.parametrize("metric", [*COUNTS, BinaryAUROC(), MulticlassAccuracy(3, average="micro"), MeanMetric()])
def test_one_class_for_all_samples_is_seen_in_counts(metric):
    for predicted, true in ((TRUTH * 0, TRUTH), (TRUTH * 0 + 1, TRUTH), (TRUTH.flip(0), TRUTH), (TRUTH * 0, TRUTH * 0)):
        metric.reset()
        metric.update(predicted.float() if isinstance(metric, BinaryAUROC) else predicted, true)
        one = len(set(predicted.tolist())) == 1 < len(set(true.tolist()))
        assert gives_one_class(metric) == (one and any(metric is known for known in COUNTS))


def test_wrappers_that_keep_more_or_hold_means_are_not_joined():
    assert not is_mergeable(MinMaxMetric(BinaryAccuracy()))
    assert not is_mergeable(fl.metrics.ByGroup(MinMaxMetric(BinaryAccuracy())))
    assert not is_mergeable(RunningMean(3))
    assert is_mergeable(MeanMetric())


@pytest.mark.fit
def test_a_torchmetrics_that_moved_a_private_name_is_refused(monkeypatch):
    assert metric_state.lacking(loop_parts.METRICS) == []
    monkeypatch.setattr(loop_parts, "METRICS", (*loop_parts.METRICS, "_of_another_release"))
    with pytest.raises(RuntimeError, match=r"torchmetrics .* it lacks \['Metric._of_another_release'\]; use"):
        fit(rounds=1)
