# SPDX-License-Identifier: Apache-2.0
import sys

import pytest
import torch

from fl_lightning.report import plot_partition

COUNTS = torch.tensor([[5, 0, 20], [0, 10, 0]])


def test_bubbles_have_areas_proportional_to_counts(tmp_path):
    pytest.importorskip("matplotlib")
    (axes,) = plot_partition(COUNTS, tmp_path / "who.png", class_names=["cat", "dog", "owl"]).axes
    assert (tmp_path / "who.png").read_bytes().startswith(b"\x89PNG")
    (dots,) = axes.collections
    assert dots.get_offsets().tolist() == [[0, 0], [0, 2], [1, 1]]
    assert (dots.get_sizes() / dots.get_sizes().max()).tolist() == pytest.approx([0.25, 1.0, 0.5])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog", "owl"]
    assert axes.get_title(loc="left") == "2 clients, 10 to 25 samples each\nlargest bubble: 20 samples"
    assert plot_partition(COUNTS, title="mine").axes[0].get_title(loc="left") == "mine"


@pytest.mark.parametrize(
    ("counts", "options", "match"),
    [
        (torch.zeros(0, 3), {}, r"non-empty \[N, C\] matrix of counts, found \[0, 3\]"),
        (torch.zeros(3), {}, "label_counts"),
        (-COUNTS, {}, "label_counts"),
        (COUNTS, {"class_names": ["a"]}, "class_names must hold 3 names, found 1"),
    ],
)
def test_refusals(counts, options, match):
    with pytest.raises(ValueError, match=match):
        plot_partition(counts, **options)


def test_missing_matplotlib_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"^plot_partition needs matplotlib: pip install '\.\[plots\]' in a checkout"):
        plot_partition(COUNTS)
