# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark's program on a tiny shape, and its arithmetic on made-up times."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from copies import ran

from benchmarks._kernels import report
from benchmarks._kernels import timing as timing_module
from benchmarks._kernels.by_hand import IN_FLOAT64, by_hand
from benchmarks._kernels.problems import OPS, Problem, shapes
from benchmarks._kernels.timing import FEWEST, FEWEST_BY_HAND, LONG, MOST, Spread, Timing, measure


def test_every_op_is_measured_and_written_down(tmp_path):
    ran("-m", "benchmarks.kernels", "--quick", "--threads", "1", "--out", str(tmp_path))
    written = json.loads((tmp_path / "kernels-cpu-quick.json").read_text())
    assert {row["op"] for row in written["results"]} == set(OPS)
    assert {row["dtype"] for row in written["results"]} == {"float32", "bfloat16", "float64"}
    assert {"date", "torch", "flags", "threads", "seed", "kernels"} <= set(written["environment"])
    assert all(row["timing"]["op"]["median"] > 0 for row in written["results"])
    assert all(limit["bandwidth"] > 0 and limit["peak"] > 0 for limit in written["limits"])
    for kind in ("plain", "exact"):
        timed = [row for row in written["results"] if row["timing"][kind] is not None]
        assert {row["op"] for row in timed} == set(OPS) - (set(IN_FLOAT64) if kind == "exact" else set())
        assert all(
            row[f"{kind}_ratio"] == row["timing"][kind]["median"] / row["timing"]["op"]["median"] for row in timed
        )
    text = (tmp_path / "kernels-cpu-quick.md").read_text()
    assert report.HEAD in text
    for row in written["results"]:
        assert f"| {row['op']} | tiny, 3 rows of {row['dtype']}, 1 thread |" in text


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [4, 70])  # of 70 a layer takes several blocks
def test_what_is_written_by_hand_computes_the_same(m, dtype, wide):
    problem = Problem(shapes(quick=True)[0], m, dtype, torch.device("cpu"), seed=0)
    for case in problem.cases(OPS):
        want = case.run()
        problem.counts.zero_()
        got = by_hand(case.op, problem, wide)()
        if case.op == "puc_track":  # whose bits stay unpacked by hand
            want = want[1]
        want, got = (found if isinstance(found, tuple) else (found,) for found in (want, got))
        for a, b in zip(got, want, strict=True):
            rounding = {torch.float64: 1e-7 if wide == torch.float64 else 1e-5, torch.bfloat16: 2e-2}.get(b.dtype, 1e-6)
            torch.testing.assert_close(a.to(b.dtype), b, rtol=rounding, atol=2e-4)


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
    timing = Timing(*(Spread(median, median, median, 5) for median in (2.0, 1.0, 3.0, 12.0)))
    result = report.Result("layer_gram", "tiny", 10, 1, 3, "float32", 2, "cpu", 120, 400, 100, 1000.0, timing)
    assert result.plain_ratio == 1.5
    assert result.exact_ratio == 6
    assert result.reads == 2
    assert result.bandwidth_share == pytest.approx(0.6)
    assert result.peak_share == pytest.approx(0.2)
    cells = report.line(result).split(" | ")
    assert cells[1:] == ["tiny, 3 rows of float32, 2 threads", "2e+03", "2.00", "3e+03", "1.50", "1.2e+04", "6.00 |"]
    assert len(cells) == report.HEAD.splitlines()[0].count(" | ") + 1 == 8
    longer = replace(result, timing=replace(timing, plain=timing.exact, exact=None))
    small = replace(result, dtype="bfloat16")
    assert "| layer_gram | 1.5 to 6 | 6 to 6 | 1.5 to 1.5 | 6 to 6 |" in report.summary([result, longer, small])


def test_repeats_follow_the_budget():
    calls = {"op": 0, "plain": 0, "exact": 0}

    def count(name):
        calls[name] += 1

    def run(budget):
        calls.update(op=0, plain=0, exact=0)
        op, plain, exact = (partial(count, name) for name in calls)
        return measure(op, lambda: 1.0, plain, exact, torch.device("cpu"), budget)

    none, ample = run(0.0), run(60.0)
    assert (none.op.count, none.plain.count, none.exact.count) == (FEWEST, FEWEST_BY_HAND, FEWEST_BY_HAND)
    assert calls["op"] == MOST + 1  # and the first, which does not count
    assert (ample.op.count, ample.plain.count, ample.exact.count) == (MOST, MOST, MOST)
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.5, 2.5, 3)


def test_what_takes_long_runs_once(monkeypatch):
    monkeypatch.setattr(timing_module, "seconds", lambda call, device: call())
    calls = []
    slow = lambda: calls.append(1) or 2 * LONG  # noqa: E731
    timing = measure(lambda: 0.1, lambda: 1.0, lambda: 0.1, slow, torch.device("cpu"), 60.0)
    assert (len(calls), timing.exact) == (1, Spread(2 * LONG, 2 * LONG, 2 * LONG, 1))
    assert timing.plain.count == MOST
