# SPDX-License-Identifier: Apache-2.0
"""The rounds benchmark on a tiny shape, and its arithmetic on made-up numbers."""

import json
import math
from itertools import pairwise

import pytest
import torch
from copies import ran

from benchmarks._rounds import fits
from benchmarks._rounds.shape import SHAPES, TINY, HandWritten
from benchmarks._rounds.timing import Median


def test_every_case_is_measured_and_written_down(tmp_path):
    ran("-m", "benchmarks.rounds", "--shapes", "tiny", "--pairs", "3", "--no-peak", "--out", str(tmp_path))
    written = json.loads((tmp_path / "rounds.json").read_text())
    assert [row["case"] for row in written["results"]] == [case.name for case in fits.CASES]
    assert {"date", "torch", "lightning", "seed", "threads", "memory"} <= set(written["environment"])
    for row in written["results"]:
        assert row["ratio"]["count"] == 3
        assert row["ratio"]["low"] <= row["ratio"]["value"] <= row["ratio"]["high"]
        values = [row[name]["value"] for name in ("foreach", "ours", "theirs", "server")]
        assert min(*values, *row["step_norms"]) > 0
        assert (row["losses"] is not None) == row["case"].startswith("FedLF")
        assert f"| tiny | {row['case']} |" in (tmp_path / "rounds.md").read_text()


def test_sides_that_do_not_do_the_same_work_are_refused(monkeypatch, tmp_path):
    class Lazy(HandWritten):
        def __call__(self):
            super().__call__()
            self.steps -= 1

    monkeypatch.setattr(fits, "HandWritten", Lazy)
    with pytest.raises(RuntimeError, match="both must take 30 steps, found 30 and 25"):
        fits.measure(TINY, fits.NO_LOG, pairs=3, warm_up=2, folder=tmp_path)


@pytest.mark.parametrize("foreach", [False, True])
def test_the_hand_written_loop_is_federated_averaging(foreach):
    x, y = TINY.data()
    loop = HandWritten(TINY, x, y, foreach=foreach)
    before = [w.clone() for w in loop.weights]
    torch.manual_seed(4)
    loop()
    torch.manual_seed(4)
    mean = [torch.zeros_like(w) for w in before]
    for client in torch.randperm(6)[:3].tolist():
        model = TINY.initial()
        with torch.no_grad():
            for p, w in zip(model.parameters(), before, strict=True):
                p.copy_(w)
        cuts = [*range(0, 21, 10)]
        order = client * 20 + torch.randperm(20)
        for start, stop in pairwise(cuts):
            chosen = order[start:stop]
            loss = torch.nn.functional.cross_entropy(model(x[chosen]), y[chosen])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, gradient in zip(model.parameters(), gradients, strict=True):
                    p -= TINY.lr * gradient
        mean = [m + p.detach() / 3 for m, p in zip(mean, model.parameters(), strict=True)]
    for found, expected in zip(loop.weights, mean, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert loop.steps == TINY.steps == 6
    moved = math.sqrt(sum(float((m - b).square().sum()) for m, b in zip(mean, before, strict=True)))
    assert loop.step_norm == pytest.approx(moved, rel=1e-4)


def test_shapes_of_the_papers_networks():
    sizes = {name: sum(p.numel() for p in SHAPES[name].initial().parameters()) for name in ("W1", "W2")}
    assert sizes == {"W1": 199_210, "W2": 797_962}
    assert (SHAPES["W1"].steps, SHAPES["W2"].steps) == (120, 100)


def test_the_interval_of_a_median():
    # Ranks 7 and 15 of 21, from tables of the sign test at 95 %.
    found = Median.of([float(value) for value in range(1, 22)])
    assert (found.value, found.low, found.high, found.count) == (11.0, 6.0, 16.0, 21)
    assert Median.of([3.0, 1.0, 2.0]) == Median(2.0, 1.0, 3.0, 3)
    assert Median.of([5.0]) == Median(5.0, 5.0, 5.0, 1)
