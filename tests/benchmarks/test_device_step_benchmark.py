# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the FedLF step on a device, tried on the CPU."""

import sys

import torch

from benchmarks import device_step
from benchmarks._kernels.problems import shapes


def test_the_step_and_its_parts_are_timed():
    times = device_step.step_times(shapes(True)[-1], 5, torch.bfloat16, torch.device("cpu"), 2)
    assert (times.rows, times.dtype, times.waits) == (5, "bfloat16", None)
    parts = (times.step, times.gram, times.solve, times.combine, times.read)
    assert all(part.count == 2 and part.median > 0 for part in parts)
    assert times.step.median > times.gram.median
    assert len(times.markdown().split("|")) == len(device_step.HEAD.splitlines()[0].split("|"))


def test_results_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["device_step", "--device", "cpu", "--quick", "--out", str(tmp_path)])
    device_step.main()
    assert "| 40 | bfloat16 |" in (tmp_path / "device-step-cpu-quick.md").read_text()
    assert (tmp_path / "device-step-cpu-quick.json").exists()
    assert "target 0.6 ms on an H100 or H200" in capsys.readouterr().out
