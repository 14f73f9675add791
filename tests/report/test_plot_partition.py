# SPDX-License-Identifier: Apache-2.0
import sys

import pytest
import torch

from fl_lightning.report import plot_partition
from fl_lightning.report.callbacks import FairnessMonitor

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
    monitor = FairnessMonitor()
    monitor.load_state_dict({"curves": {"acc": {"rounds": [1], "mean": [0.5], "angle": [0.1], "worst_10": [0.2]}}})
    with pytest.raises(ImportError, match=rf"^FairnessMonitor\.plot {words}"):
        monitor.plot("curves.png")
