# SPDX-License-Identifier: Apache-2.0
import doctest
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning import metrics
from fl_lightning.metrics import functional as F

NAN = float("nan")


@pytest.mark.parametrize("module", [F, metrics.client, metrics.group_fairness, metrics.group_frame, metrics.by_group])
def test_doctests_run(module):
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted >= 2
    assert result.failed == 0


def test_angle_of_one_client_in_ten_is_the_papers_value():
    one_hot = torch.zeros(10)
    one_hot[3] = 0.9
    assert float(F.fairness_angle(one_hot)) == pytest.approx(1.2490457723982544, abs=1e-12)


def test_angle_keeps_its_digits_where_the_arccosine_loses_them():
    a = torch.tensor([0.5, 0.5 + 2e-9], dtype=torch.float64)
    exact = math.atan2(1e-9, 0.5 + 1e-9)
    assert float(F.fairness_angle(a)) == pytest.approx(exact, rel=1e-6)
    cosine = float(a.sum() / (a.norm() * math.sqrt(2)))
    assert abs(math.acos(min(1.0, cosine)) - exact) > 1e-2 * exact  # the textbook form really is worse here


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_angle_does_not_depend_on_the_scale(scale):
    a = torch.tensor([0.2, 0.7, 0.9], dtype=torch.float64)
    assert float(F.fairness_angle(a * scale)) == pytest.approx(float(F.fairness_angle(a)), rel=1e-12)


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=30).filter(any))
@settings(max_examples=50, deadline=None)
def test_angle_is_the_arccos_of_its_definition_whatever_the_sign(values):
    a = torch.tensor(values, dtype=torch.float64)
    angle = float(F.fairness_angle(a))
    assert float(F.fairness_angle(-a)) == angle
    cosine = float(a.sum().abs() / (a.norm() * math.sqrt(len(a))))
    assert angle == pytest.approx(math.acos(min(1.0, cosine)), abs=1e-6)
    if sum(values):
        assert math.tan(angle) == pytest.approx(abs(float(a.std(correction=0) / a.mean())), rel=1e-9, abs=1e-12)


def test_angle_edge_cases():
    assert math.isnan(F.fairness_angle(torch.zeros(4)))
    assert math.isnan(F.fairness_angle(torch.full((3,), NAN)))
    assert float(F.fairness_angle(torch.tensor([0.3]))) == 0.0
    assert float(F.fairness_angle(torch.tensor([-3.0, -3.0, -3.0]))) == 0.0
    assert float(F.fairness_angle(torch.tensor([-1.0, 1.0]))) == pytest.approx(math.pi / 2)
    assert float(F.fairness_angle(torch.tensor([1, 1, 0]))) == pytest.approx(math.atan(math.sqrt(2) / 2))
    assert float(F.fairness_angle(torch.tensor([0.5, NAN, 0.5]))) == 0.0


def test_weighted_mean():
    values, sizes = torch.tensor([1.0, 0.0, NAN]), torch.tensor([3, 1, 100])
    assert float(F.weighted_mean(values, sizes)) == pytest.approx(0.75)
    with pytest.raises(ValueError, match=r"sizes must have shape \[3\], found \[2\]"):
        F.weighted_mean(values, sizes[:2])
    with pytest.raises(ValueError, match=r"sizes must be finite and not negative, found \[1, -1, 2\]"):
        F.weighted_mean(values, torch.tensor([1, -1, 2]))


def test_fractions_count_at_least_one_client_and_respect_the_orientation():
    values = torch.arange(100, dtype=torch.float64).flip(0)
    assert float(F.worst_fraction(values, 0.05)) == 2.0
    assert float(F.best_fraction(values, 0.05)) == 97.0
    assert float(F.worst_fraction(values, 0.05, larger_is_better=False)) == 97.0
    assert float(F.best_fraction(values, 0.05, larger_is_better=False)) == 2.0
    assert float(F.worst_fraction(values[:3], 0.05)) == 97.0
    assert float(F.worst_fraction(values[:36], 0.05)) == 64.5  # 1.8 clients are two
    assert float(F.worst_fraction(values, 1.0)) == float(F.mean(values)) == 49.5


def test_summary_leaves_clients_without_data_out_and_counts_the_rest():
    values = torch.cat([torch.arange(20, dtype=torch.float32) / 20, torch.tensor([NAN, NAN])])
    sizes = torch.cat([torch.arange(1, 21), torch.tensor([0, 7])])
    summary = F.fairness_summary(values, sizes)
    assert list(summary) == [
        "mean", "weighted_mean", "std", "angle", "worst_5", "best_5", "worst_10", "best_10", "min", "max", "clients",
    ]  # fmt: skip
    assert int(summary["clients"]) == 20
    expected = F.fairness_summary(values[:20], sizes[:20])
    assert {k: float(v) for k, v in summary.items()} == {k: float(v) for k, v in expected.items()}
    assert float(summary["worst_5"]) == 0.0
    assert float(summary["worst_10"]) == pytest.approx(0.025)
    assert float(summary["max"]) == pytest.approx(0.95)
    weighted = sum(i / 20 * (i + 1) for i in range(20)) / 210
    assert float(summary["weighted_mean"]) == pytest.approx(weighted, rel=1e-6)


def test_summary_of_a_loss_has_no_angle_and_its_worst_is_the_highest():
    summary = F.fairness_summary(torch.tensor([1.0, 5.0]), torch.ones(2), larger_is_better=False)
    assert "angle" not in summary
    assert float(summary["worst_10"]) == 5.0
    assert float(summary["best_10"]) == 1.0


def test_summary_without_any_value_is_nan():
    summary = F.fairness_summary(torch.tensor([NAN]), torch.tensor([1]))
    assert int(summary.pop("clients")) == 0
    assert all(math.isnan(value) for value in summary.values())


@pytest.mark.parametrize("values", [torch.empty(0), torch.ones(2, 2), torch.tensor(1.0), torch.ones(2) * 1j])
@pytest.mark.parametrize("function", [F.fairness_angle, F.mean, F.std, lambda v: F.best_fraction(v, 0.1)])
def test_values_must_be_a_real_vector(function, values):
    with pytest.raises(ValueError, match="values must be a non-empty real vector"):
        function(values)


def test_half_and_integer_values_are_computed_in_float64():
    assert F.mean(torch.tensor([1, 2])).dtype == torch.float64
    assert float(F.mean(torch.full((3000,), 0.25, dtype=torch.bfloat16))) == 0.25


def test_conflicts_are_strictly_negative_products():
    dots = torch.tensor([[1.0, -1.0, 0.0, -0.0], [-2.0, 0.5, 0.0, 3.0]], dtype=torch.float64)
    counts = F.conflict_counts(dots)
    assert int(counts.model) == 2
    assert counts.layers.tolist() == [1, 1]
    rows, step = torch.randn(7, 12, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    products = (rows * step).view(7, 3, 4).sum(-1).T
    assert int(F.conflict_counts(products).model) == int((rows @ step < 0).sum())


def test_conflicts_refuse_bad_input():
    with pytest.raises(ValueError, match=r"found others in columns \[1\]"):
        F.conflict_counts(torch.tensor([[1.0, NAN], [0.0, 1.0]]))
    for bad in (torch.ones(3), torch.empty(0, 3), torch.empty(2, 0)):
        with pytest.raises(ValueError, match="dots must be a non-empty"):
            F.conflict_counts(bad)


SMALL = (
    "val_loss loss ValLoss perplexity val/mse MAE val_rmse_epoch test_err valRMSE word_error val_SMAPE test/cal/ECE "
    "cls/Brier FPR95"
)
MODES = {
    **dict.fromkeys(SMALL.split(), "min"),
    **dict.fromkeys(["val_acc", "accuracy", "f1", "AUROC", "preferred_acc", "transfer_iou", "maestro"], "max"),
    **dict.fromkeys(("val/dp_gap", "eod"), "abs"),
}


@pytest.mark.parametrize("name", MODES)
def test_modes_guessed_from_names(name):
    assert F.guessed_mode(name) == MODES[name]
    assert F.is_larger_better(name) == (MODES[name] == "max")
