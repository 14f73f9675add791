# SPDX-License-Identifier: Apache-2.0
"""Group fairness has fairlearn's values on the same data, and differs from it where the docs say so."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, precision_score
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision

from fl_lightning.metrics import ByGroup, DemographicParity, EqualizedOdds, EqualOpportunity

theirs = pytest.importorskip("fairlearn.metrics", reason="fairlearn is in the extra test")
METHODS = ("between_groups", "to_overall")
close = partial(pytest.approx, abs=1e-12, nan_ok=True)


def precision(y_true, y_pred):
    return precision_score(y_true, y_pred, zero_division=0)


@st.composite
def people(draw):
    """Predictions, labels and groups, each with two samples of every label in each group."""
    num_groups = draw(st.integers(2, 4))
    count = draw(st.integers(0, 40))
    bits = st.lists(st.integers(0, 1), min_size=count, max_size=count)
    groups = draw(st.lists(st.integers(0, num_groups - 1), min_size=count, max_size=count))
    sure = [(draw(st.integers(0, 1)), label, group) for group in range(num_groups) for label in (0, 1, 0, 1)]
    predictions, labels, members = zip(*sure, *zip(draw(bits), draw(bits), groups, strict=True), strict=True)
    return (*(np.array(values) for values in (predictions, labels, members)), num_groups)


@settings(max_examples=10, deadline=None)
@given(people(), st.sampled_from(METHODS), st.sampled_from(["difference", "ratio"]))
def test_parity_opportunity_and_odds_are_those_of_fairlearn(data, method, compare):
    predictions, labels, groups, num_groups = data
    tensors = tuple(map(torch.from_numpy, (predictions, labels, groups)))
    known = {"y_true": labels, "y_pred": predictions, "sensitive_features": groups, "method": method}
    with np.errstate(invalid="ignore"):
        parity = getattr(theirs, f"demographic_parity_{compare}")(**known)
        opportunity = getattr(theirs, f"equal_opportunity_{compare}")(**known)
        mean = getattr(theirs, f"equalized_odds_{compare}")(**known, agg="mean")
        rates = {"tpr": theirs.true_positive_rate, "fpr": theirs.false_positive_rate}
        frame = theirs.MetricFrame(metrics=rates, y_true=labels, y_pred=predictions, sensitive_features=groups)
        both = getattr(frame, compare)(method=method)
        worst = getattr(theirs, f"equalized_odds_{compare}")(**known)
    for kind, arguments, expected in (
        (DemographicParity, (tensors[0], tensors[2]), parity),
        (EqualOpportunity, tensors, opportunity),
        (EqualizedOdds, tensors, worst if not both.isna().any() else both.min()),
        (partial(EqualizedOdds, agg="mean"), tensors, mean),
    ):
        metric = kind(num_groups=num_groups, compare=compare, method=method)
        metric.update(*arguments)
        assert float(metric.compute()) == close(float(expected))
    assert metric.frame().by_group.numpy() == close(frame.by_group.to_numpy(dtype=float).T)
    assert metric.frame().overall.numpy() == close(frame.overall.to_numpy(dtype=float))
    assert metric.frame().group_min().numpy() == close(frame.group_min().to_numpy(dtype=float))
    assert metric.frame().group_max().numpy() == close(frame.group_max().to_numpy(dtype=float))


@settings(max_examples=6, deadline=None)
@given(people(), st.sampled_from(METHODS), st.sampled_from(["difference", "ratio"]), st.integers(1, 7))
def test_any_metric_by_group_is_that_of_a_metric_frame(data, method, compare, size):
    predictions, labels, groups, num_groups = data
    for ours, function in ((BinaryAccuracy(), accuracy_score), (BinaryPrecision(), precision)):
        frame = theirs.MetricFrame(metrics=function, y_true=labels, y_pred=predictions, sensitive_features=groups)
        metric = ByGroup(ours, num_groups, compare, method)
        tensors = [torch.from_numpy(values).split(size) for values in (predictions, labels, groups)]
        for predicted, truth, members in zip(*tensors, strict=True):
            metric.update(predicted, truth, groups=members)
        with np.errstate(invalid="ignore"):
            expected = float(getattr(frame, compare)(method=method))
        assert float(metric.compute()) == pytest.approx(expected, abs=1e-6, nan_ok=True)
        assert metric.frame().by_group.tolist() == pytest.approx(frame.by_group.tolist(), abs=1e-6)
        assert float(metric.frame().overall) == pytest.approx(float(frame.overall), abs=1e-6)
        batch = metric(*map(torch.from_numpy, (predictions, labels)), groups=torch.from_numpy(groups))
        assert float(batch) == pytest.approx(expected, abs=1e-6, nan_ok=True)
        metric.reset()
        assert math.isnan(metric.compute())


def test_where_fairlearn_gives_another_number():
    """One group, a group without the label that a rate needs, and odds of which one ratio is undefined."""
    predictions, labels, groups = np.array([1, 0, 1, 1]), np.array([1, 1, 0, 0]), np.array([0, 0, 1, 1])
    alone = {"y_true": labels[:2], "y_pred": predictions[:2], "sensitive_features": groups[:2]}
    assert theirs.demographic_parity_difference(**alone) == 0
    assert theirs.demographic_parity_ratio(**alone) == 1
    metric = DemographicParity()
    metric.update(torch.from_numpy(predictions[:2]), torch.from_numpy(groups[:2]))
    assert math.isnan(metric.compute())

    known = {"y_true": labels, "y_pred": predictions, "sensitive_features": groups}
    assert theirs.equal_opportunity_difference(**known) == 0.5  # group 1 has no label 1, and its rate counts as 0
    opportunity = EqualOpportunity()
    opportunity.update(*map(torch.from_numpy, (predictions, labels, groups)))
    assert math.isnan(opportunity.compute())

    silent = {"y_true": np.array([1, 1, 0, 0, 0]), "y_pred": np.array([0, 0, 1, 1, 0])}
    members = np.array([0, 1, 0, 1, 1])
    with np.errstate(invalid="ignore"):
        assert math.isnan(theirs.equalized_odds_ratio(**silent, sensitive_features=members))
    odds = EqualizedOdds(compare="ratio")
    odds.update(*map(torch.from_numpy, (silent["y_pred"], silent["y_true"], members)))
    assert float(odds.compute()) == 0.5
