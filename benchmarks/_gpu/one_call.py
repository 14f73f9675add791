# SPDX-License-Identifier: Apache-2.0
"""Calls the ops that are the farthest from what the device can do, for a profiler.

    python -m benchmarks._gpu.one_call RESULTS [--device cuda|cpu] [--quick]

RESULTS is the JSON file of benchmarks.device_bandwidth. Each op is called twice, and the profiler's range is open for
the second call.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks._gpu.facts import add_device
from benchmarks._kernels.problems import Problem, shapes


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    add_device(parser)
    parser.add_argument("--quick", action="store_true", help="a tiny shape")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    for op, m, dtype in json.loads(arguments.results.read_text("utf-8"))["worst"]:
        problem = Problem(shapes(arguments.quick)[-1], m, getattr(torch, dtype), device, seed=0)
        (case,) = problem.cases((op,))
        case.run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.profiler.start()
        case.run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.profiler.stop()
        print(f"called {op}, {m} rows of {dtype}")


if __name__ == "__main__":
    main()
