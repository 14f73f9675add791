# SPDX-License-Identifier: Apache-2.0
"""Random calls of the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer; `make sanitize` makes more."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import sanitizers
from once import once

KEPT = sanitizers.HERE.parents[1] / "build" / "sanitize"  # of all runs, by what they are built from
CALLS = 400  # in each instruction set


def built(folder):
    """Puts the program there, which takes half a minute unless another run has built the same."""
    kept = KEPT / sanitizers.digest(*sanitizers.QUICK)
    if not kept.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        part = shutil.copy(sanitizers.build(folder, *sanitizers.QUICK), f"{kept}.{os.getpid()}")
        Path(part).replace(kept)
    shutil.copy(kept, folder / "kept")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    obstacle = sanitizers.why_not(tmp_path_factory.mktemp("compiler"))
    if obstacle is not None:
        pytest.skip(obstacle)
    return once(tmp_path_factory, "sanitize", built) / "kept"


def declared():
    """The kernels of csrc/ops.h."""
    header = (sanitizers.KERNELS.parent / "ops.h").read_text(encoding="utf-8")
    cpu = header.split("namespace cpu {")[1].split("}  // namespace cpu")[0]
    return set(re.findall(r"^void (\w+)\(", cpu, re.MULTILINE))


@pytest.mark.parametrize("instructions", sanitizers.SETS)
def test_random_calls_agree_with_plain_loops(program, instructions):
    if instructions not in sanitizers.instruction_sets(program):
        pytest.skip(f"not on this machine: {instructions}")
    result = sanitizers.calls(program, instructions, CALLS, seed=1)
    assert result.returncode == 0, result.stdout + result.stderr
    counted = {line.split()[0]: int(line.split()[1]) for line in result.stdout.splitlines()[1:]}
    assert set(counted) == declared()
    assert sum(counted.values()) >= CALLS
    assert min(counted.values()) > CALLS // 50


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (1, "heap-buffer-overflow"),  # a read behind the rows
        (2, "use-after-poison"),  # a write behind the scratch memory
        (3, "use-after-poison|margin["),  # a write before the output
        (4, "out["),  # scratch memory that is read before it was written
        (5, "heap-use-after-free"),  # scratch memory from before it moved
        (6, "signed integer overflow"),
        (7, "byte["),  # bits that differ from call to call
        (8, "byte["),  # an output that was not written
    ],
)
def test_mistakes_are_found(program, kind, found):
    result = subprocess.run([str(program), "fault", str(kind)], capture_output=True, text=True, check=False)
    report = result.stdout + result.stderr
    assert result.returncode != 0, report
    assert any(sign in report for sign in found.split("|")), report


def test_no_mistake_no_finding(program):
    result = subprocess.run([str(program), "fault", "0"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == "fault 0: not found\n"
