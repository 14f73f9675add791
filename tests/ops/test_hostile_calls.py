# SPDX-License-Identifier: Apache-2.0
"""Whatever the ops are called with, the process lives."""

import multiprocessing
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from implementations import EVERY, samples
from ops import hostile_calls

ROOT = Path(__file__).parents[2]
CALLS = int(os.environ.get("FL_LIGHTNING_HOSTILE_CALLS", "800"))


def make_calls(last):
    warnings.simplefilter("ignore")  # errors in other tests
    hostile_calls.main(CALLS, 0, last)


@pytest.mark.process
def test_hostile_calls_end_in_numbers_or_errors(tmp_path, capfd):
    """In a copy of this process."""
    last = tmp_path / "last"
    process = multiprocessing.get_context("fork").Process(target=make_calls, args=(last,))
    process.start()
    process.join(300)
    process.kill()
    printed = capfd.readouterr()
    assert process.exitcode == 0, f"{last.read_text()}{printed.err[-3000:]}"
    assert printed.out.count("\n") == 1, printed.out  # no difference from the reference, only the counts


@pytest.mark.slow
@pytest.mark.process
def test_hostile_calls_of_the_reference_end_in_numbers_or_errors(tmp_path):
    environment = {**os.environ, "FL_LIGHTNING_DISABLE_EXT": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, hostile_calls.__file__, str(CALLS), "0", str(tmp_path / "last")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, f"{(tmp_path / 'last').read_text()}{result.stderr[-3000:]}"
    assert result.stdout.count("\n") == 1, result.stdout


@pytest.mark.parametrize("call", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_added_to_a_step(call, dtype):
    """Another dtype than the rows' goes through the kernel in stretches, as wide as the rows are few."""
    _, rows, offsets, coeff = samples()["layer_combine_add"]
    with pytest.raises((ValueError, RuntimeError), match=r"rows must have shape \[m, n\] with at least one row"):
        call("layer_combine_add", torch.zeros(50, dtype=dtype), rows[:0], offsets, coeff[:, :0])
