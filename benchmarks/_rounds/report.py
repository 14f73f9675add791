# SPDX-License-Identifier: Apache-2.0
"""Results as Markdown and JSON, and the peak memory of either side."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Sequence

import lightning as L
import torch

import fl_lightning as fl
from benchmarks._rounds.fits import Result
from benchmarks._rounds.shape import SEED, Shape


def environment(shapes: Sequence[Shape], pairs: int, memory: str) -> dict[str, str | int]:
    """What a reader needs to judge the numbers."""
    variables = ("OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "fl_lightning": fl.__version__,
        "seed": SEED,
        "threads": torch.get_num_threads(),
        "pairs": pairs,
        "memory": memory,
        "variables": " ".join(f"{name}={os.environ[name]}" for name in variables if name in os.environ) or "none",
        **{shape.name: shape.what for shape in shapes},
    }


HEAD = (
    "| shape | case | x hand-written "
    "| x with _foreach_add_ | ms/round ours | hand-written | steps/s ours | server side | loss pass x forward "
    "| page faults/round ours | hand-written |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def line(result: Result) -> str:
    """One row of the table."""
    loss = "-" if result.losses is None else result.losses.text(2)
    return (
        f"| {result.shape} | {result.case} | {result.ratio.text()} "
        f"| {result.foreach.text()} | {1e3 * result.ours_wall.value:.0f} "
        f"| {1e3 * result.theirs_wall.value:.0f} | {result.steps / result.ours_wall.value:.0f} "
        f"| {1e3 * result.server.value:.1f} ms, {100 * result.server_share:.1f} % | {loss} "
        f"| {result.faults[0]:.0f} | {result.faults[1]:.0f} |"
    )


def peak_memory(shape: Shape, side: str) -> float:
    """Peak resident MiB of a process that runs three rounds of one side, data included.

    Args:
        shape: what to train.
        side: ``"ours"`` or ``"hand-written"``.
    """
    code = f"from benchmarks._rounds.alone import main; main({shape.name!r}, {side!r})"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])
