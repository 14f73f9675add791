# SPDX-License-Identifier: Apache-2.0
"""What a federated round costs beside a hand-written PyTorch loop that does the same work.

    python -m benchmarks.rounds [--shapes W1 W2] [--pairs 41] [--cases 0 1 2] [--keep-memory] [--out DIR]

One round of ours, one of the hand-written loop and one of the same loop with ``torch._foreach_add_`` in place of
``torch.optim.SGD`` are timed in turn, in the same process, on one thread; a pair gives one ratio, in processor time.
Pairs taken next to each other share whatever else the machine is doing. Both sides are checked to take the same number
of local steps.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks._kernels.memory import keep_freed_memory
from benchmarks._rounds import report
from benchmarks._rounds.fits import CASES, measure
from benchmarks._rounds.shape import SHAPES

WARM_UP = 4


def main() -> None:
    """Prints a Markdown table and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["W1", "W2"])
    parser.add_argument("--pairs", type=int, default=41, help="pairs of rounds per case (at least 3)")
    parser.add_argument(
        "--cases", nargs="+", type=int, choices=range(len(CASES)), default=list(range(len(CASES))), metavar="CASE",
        help="; ".join(f"{number}: {case.name}" for number, case in enumerate(CASES)),
    )  # fmt: skip
    parser.add_argument("--keep-memory", action="store_true", help="let glibc keep what is freed, for both sides")
    parser.add_argument("--no-peak", action="store_true", help="leave out the peak memory of either side")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="folder for the results")
    parser.add_argument("--name", default="rounds", help="name of the results")
    arguments = parser.parse_args()
    if arguments.pairs < 3:
        parser.error(f"--pairs must be at least 3, found {arguments.pairs}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    shapes = [SHAPES[name] for name in arguments.shapes]
    memory = keep_freed_memory() if arguments.keep_memory else "as the C library has it"
    facts = report.environment(shapes, arguments.pairs, memory)
    lines = ["# Rounds", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += [
        "Ratios in processor time, the rest on the wall; medians with intervals that cover them with 95 %.",
        "",
    ]
    lines.append(report.HEAD)
    print("\n".join(lines), flush=True)
    results = []
    with TemporaryDirectory() as folder:
        for shape in shapes:
            for case in (CASES[number] for number in arguments.cases):
                results.append(measure(shape, case, arguments.pairs, WARM_UP, Path(folder)))
                lines.append(report.line(results[-1]))
                print(lines[-1], flush=True)
    peaks = {}
    if not arguments.no_peak:
        for shape in shapes:
            peaks[shape.name] = {side: report.peak_memory(shape, side) for side in ("ours", "hand-written")}
            found = ", ".join(f"{side} {peak:.0f} MiB" for side, peak in peaks[shape.name].items())
            lines += ["", f"Peak memory of a process with {shape.name}'s data: {found}."]
            print("\n" + lines[-1], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    written = {"environment": facts, "results": [asdict(result) for result in results], "peak_mib": peaks}
    (arguments.out / f"{arguments.name}.json").write_text(json.dumps(written, indent=1) + "\n")
    (arguments.out / f"{arguments.name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
