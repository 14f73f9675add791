# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark's program on a tiny shape, and its arithmetic on made-up times."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import kernels
from benchmarks._kernels import report
from benchmarks._kernels.problems import OPS, Problem, shapes
from benchmarks._kernels.timing import FEWEST, FEWEST_LOOPS, MOST, Spread, Timing, measure

ROOT = Path(__file__).parents[2]


def program(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.kernels", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_every_op_is_measured_and_written_down(tmp_path):
    ran = program("--quick", "--threads", "1", "--out", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    written = json.loads((tmp_path / "kernels-cpu-quick.json").read_text())
    assert {row["op"] for row in written["results"]} == set(OPS)
    assert {row["dtype"] for row in written["results"]} == {"float32", "bfloat16", "float64"}
    assert {"date", "torch", "flags", "threads", "seed", "kernels"} <= set(written["environment"])
    assert all(row["timing"]["op"]["median"] > 0 for row in written["results"])
    assert all(limit["bandwidth"] > 0 and limit["peak"] > 0 for limit in written["limits"])
    looped = [row for row in written["results"] if row["timing"]["loop"] is not None]
    assert [(row["op"], row["dtype"]) for row in looped] == [("layer_gram", "float32")]
    assert looped[0]["loop_ratio"] == looped[0]["timing"]["loop"]["median"] / looped[0]["timing"]["op"]["median"]
    text = (tmp_path / "kernels-cpu-quick.md").read_text()
    assert f"| layer_gram, tiny, m = 3 | 1 | {looped[0]['loop_ratio']:.2f} |" in text
    for row in written["results"]:
        assert f"| {row['op']} | tiny | 3 | {row['dtype']} | 1 |" in text


@pytest.mark.parametrize("arguments", [("--threads", "0"), ("--ops", "layer_sum"), ("--device", "cuda")])
def test_wrong_arguments_are_named(arguments, monkeypatch, capsys):
    if arguments == ("--device", "cuda") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["kernels", "--quick", *arguments])
    with pytest.raises(SystemExit):
        kernels.main()
    assert arguments[0] in capsys.readouterr().err


def test_shapes_of_the_papers_networks():
    found = {shape.name: (shape.columns, shape.layers) for shape in shapes(quick=False)}
    assert found == {"MLP": (199_210, 6), "CNN": (797_962, 10), "ResNet-18": (11_689_512, 62)}


def test_ops_and_references_agree_on_the_problem_that_is_timed():
    problem = Problem(shapes(quick=True)[0], 4, torch.float32, torch.device("cpu"), seed=0)
    for case in problem.cases(OPS):
        if case.op == "puc_track":  # changes counts, and takes another client each time
            continue
        got, want = case.run(), case.reference()
        for a, b in zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_loop_written_by_hand_computes_the_same_products():
    problem = Problem(shapes(quick=True)[0], 4, torch.float32, torch.device("cpu"), seed=0)
    loops = {case.op: case for case in problem.cases(OPS) if case.loop is not None}
    assert set(loops) == {"layer_gram"}
    torch.testing.assert_close(loops["layer_gram"].loop().double(), loops["layer_gram"].run(), rtol=1e-5, atol=1e-3)


def test_counted_bytes_and_operations():
    problem = Problem(shapes(quick=True)[0], 4, torch.bfloat16, torch.device("cpu"), seed=0)
    counted = {case.op: (case.bytes, case.flops) for case in problem.cases(OPS)}
    n, layers = 9_000, 4
    assert counted["layer_gram"] == (n * 4 * 2 + layers * 16 * 8, n * 4 * 5)
    assert counted["layer_combine"] == (n * 4 * 2 + n * 2 + layers * 4 * 8, 2 * n * 4)
    assert counted["layer_cross_combine"] == (n * 14 * 2 + n * 2 + layers * 14 * 8, 2 * n * 14)
    assert counted["puc_track"] == (n * 2 + 2 * n + n // 8 + layers * 8, 2 * n)
    assert counted["puc_combine"] == (n * 4 * 2 + n * 4 // 8 + n * 2, 3 * n * 4)
    assert counted["trimmed_mean"] == (n * 4 * 2 + n * 2, 0)


def test_shares_are_ratios_of_medians():
    timing = Timing(Spread(2.0, 2, 2, 5), Spread(12.0, 12, 12, 1), Spread(1.0, 1, 1, 5))
    result = report.Result("layer_gram", "tiny", 10, 1, 3, "float32", 1, "cpu", 120, 400, 100, 1000.0, timing)
    assert result.speed_up == 6
    assert result.reads == 2
    assert result.bandwidth_share == pytest.approx(0.6)
    assert result.peak_share == pytest.approx(0.2)


def test_repeats_follow_the_budget():
    calls = {"op": 0, "reference": 0, "loop": 0}

    def count(name):
        calls[name] += 1

    def run(budget):
        calls.update(op=0, reference=0, loop=0)
        op, reference, loop = (partial(count, name) for name in calls)
        return measure(op, reference, lambda: 1.0, torch.device("cpu"), budget, loop)

    none, ample = run(0.0), run(60.0)
    assert (none.op.count, none.reference.count, none.loop.count) == (FEWEST, 1, FEWEST_LOOPS)
    assert calls["op"] == MOST + 1  # and the first, which does not count
    assert (ample.op.count, ample.reference.count, ample.loop.count) == (MOST, MOST, MOST)
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.5, 2.5, 3)
