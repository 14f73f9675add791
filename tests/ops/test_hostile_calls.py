# SPDX-License-Identifier: Apache-2.0
"""Whatever the ops are called with, the process lives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from implementations import EVERY, samples

ROOT = Path(__file__).parents[2]
CALLS = int(os.environ.get("FL_LIGHTNING_HOSTILE_CALLS", "800"))


@pytest.mark.process
@pytest.mark.parametrize("without", ["", pytest.param("1", marks=pytest.mark.slow)], ids=["kernels", "reference"])
def test_hostile_calls_end_in_numbers_or_errors(without, tmp_path):
    environment = {**os.environ, "FL_LIGHTNING_DISABLE_EXT": without, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name("hostile_calls.py"))]
    last = tmp_path / "last"
    result = subprocess.run(
        [*command, str(CALLS), "0", str(last)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, f"{last.read_text()}{result.stderr[-3000:]}"
    assert result.stdout.count("\n") == 1, result.stdout  # no difference from the reference, only the counts


@pytest.mark.parametrize("call", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_added_to_a_step(call, dtype):
    """Another dtype than the rows' goes through the kernel in stretches, as wide as the rows are few."""
    _, rows, offsets, coeff = samples()["layer_combine_add"]
    with pytest.raises((ValueError, RuntimeError), match=r"rows must have shape \[m, n\] with at least one row"):
        call("layer_combine_add", torch.zeros(50, dtype=dtype), rows[:0], offsets, coeff[:, :0])
