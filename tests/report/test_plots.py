# SPDX-License-Identifier: Apache-2.0
import sys
from dataclasses import replace

import pytest
import torch
from records import fit_record, round_of

from fl_lightning.report import FitRecord, plot_conflicts, plot_fairness, plot_partition
from fl_lightning.report.record_builder import RecordBuilder

COUNTS = torch.tensor([[5, 0, 20], [0, 10, 0]])


@pytest.fixture
def figure():
    return pytest.importorskip("matplotlib.figure")


def test_bubbles_have_areas_proportional_to_counts(figure, tmp_path):
    (axes,) = plot_partition(COUNTS, tmp_path / "who.png", class_names=["cat", "dog", "owl"]).axes
    assert (tmp_path / "who.png").stat().st_size > 5000
    (dots,) = axes.collections
    assert dots.get_offsets().tolist() == [[0, 0], [0, 2], [1, 1]]
    assert (dots.get_sizes() / dots.get_sizes().max()).tolist() == pytest.approx([0.25, 1.0, 0.5])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog", "owl"]
    assert axes.get_title(loc="left") == "2 clients, 10 to 25 samples each\nlargest bubble: 20 samples"


def test_bars_stack_to_the_sizes(figure):
    target = figure.Figure().subplots()
    assert plot_partition(COUNTS, target, kind="bars", title="mine") is target.figure
    stacks = [patch.get_data() for patch in target.patches]
    assert [(s.baseline.tolist(), s.values.tolist()) for s in stacks] == [
        ([0, 0], [5, 0]),
        ([5, 0], [5, 10]),
        ([5, 10], [25, 10]),
    ]
    assert stacks[0].edges.tolist() == [-0.5, 0.5, 1.5]
    assert target.get_title(loc="left") == "mine"
    assert plot_partition(torch.ones(30, 40), kind="bars").axes[0].get_legend() is None


@pytest.mark.parametrize(
    ("counts", "options", "match"),
    [
        (torch.zeros(0, 3), {}, r"non-empty \[N, C\] matrix of counts, found \[0, 3\]"),
        (torch.zeros(3), {}, "label_counts"),
        (-COUNTS, {}, "label_counts"),
        (COUNTS, {"class_names": ["a"]}, "class_names must hold 3 names, found 1"),
        (COUNTS, {"kind": "pie"}, "kind of plot_partition must be 'bubbles' or 'bars', found 'pie'"),
    ],
)
def test_refusals(counts, options, match):
    with pytest.raises(ValueError, match=match):
        plot_partition(counts, **options)


def test_missing_matplotlib_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = r"needs matplotlib: pip install '\.\[plots\]' in a checkout"
    with pytest.raises(ImportError, match=f"^plot_partition {words}"):
        plot_partition(COUNTS)
    with pytest.raises(ImportError, match=f"^plot_fairness {words}"):
        plot_fairness(fit_record())


def test_fairness_over_the_rounds(figure, tmp_path):
    record = fit_record(rounds=3)
    for metric, panels in ((None, 2), ("val_loss", 1)):  # a loss has no angle
        drawn = plot_fairness(record, tmp_path / f"{metric}.png", metric)
        assert (tmp_path / f"{metric}.png").read_bytes().startswith(b"\x89PNG")
        series = next(series for series in record.metrics if series.metric == (metric or "val_acc"))
        assert [line.get_ydata().tolist() for line in drawn.axes[0].get_lines()] == [
            list(series.summaries[key]) for key in ("mean", "worst_10")
        ]
        assert drawn.axes[0].get_ylabel() == series.metric
        assert len(drawn.axes) == panels
    assert drawn.axes[0].get_lines()[0].get_xdata().tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match=r"metric must be one of \['val_acc', 'val_loss'\], found 'f1'"):
        plot_fairness(record, metric="f1")
    with pytest.raises(ValueError, match=r"metric must be one of \[\], found None"):
        plot_fairness(FitRecord("FedAvg"))


def test_fairness_of_the_clients_own_models():
    record = fit_record(own=True)
    assert plot_fairness(record).axes[0].get_ylabel() == "personal/val_acc"
    assert plot_fairness(record, metric="val_acc").axes[0].get_ylabel() == "val_acc"


def test_conflicts_per_layer_and_round(figure, tmp_path):
    builder = RecordBuilder(FitRecord("FedAvg"))
    for number in range(3):
        made = replace(round_of(number, range(4)), conflicts=number, layer_conflicts={"a": 1, "b": 4})
        builder.add_round(made, None)
    axes = plot_conflicts(builder.record(), tmp_path / "conflicts.png").axes[0]
    assert (tmp_path / "conflicts.png").read_bytes().startswith(b"\x89PNG")
    images = axes.get_images()
    assert [image.get_array().tolist() for image in images] == [[[0, 25, 50]], [[25, 25, 25]], [[100, 100, 100]]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["whole model", "a", "b"]
    assert images[0].get_extent() == [0.5, 3.5, 0.5, -0.5]  # rounds 1 to 3
    for number in range(3, 500):
        builder.add_round(round_of(number, range(4), layers=("a", "b")), None)
    assert plot_conflicts(builder.record()).axes[0].get_images()[0].get_array().shape == (1, 167)
    with pytest.raises(ValueError, match="must have one finished round or more, found none"):
        plot_conflicts(FitRecord("FedAvg"))
