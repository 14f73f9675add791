# SPDX-License-Identifier: Apache-2.0
"""Each op against good PyTorch code and against the machine's limits, measured in the same run.

    python -m benchmarks.kernels [--device cpu|cuda] [--quick] [--out DIR] [--threads 1,2] [--ops ...]

Prints Markdown; writes Markdown and JSON. The op, torch by hand and a plain read of the rows take turns. About a
quarter of an hour in all on two cores, with 12 GB of memory.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._kernels import report
from benchmarks._kernels.by_hand import IN_FLOAT64, by_hand
from benchmarks._kernels.limits import Limits
from benchmarks._kernels.memory import keep_freed_memory
from benchmarks._kernels.problems import ON_GRAM, OPS, TRACKED, Problem, Shape, shapes
from benchmarks._kernels.report import Result
from benchmarks._kernels.timing import measure
from fl_lightning import ops

CLIENTS = (10, 40, 100)
DTYPES = (torch.float32, torch.bfloat16)
SEED = 0
BUDGET = 0.03  # seconds for the op and for torch, each


Rates = list[dict[str, float]]


def run(
    limits: Limits,
    device: torch.device,
    threads: list[int],
    chosen: tuple[str, ...],
    quick: bool,
    save: Callable[[Rates, list[Result]], None],
) -> list[Result]:
    """Measures everything; saves what there is after each matrix, so that a run that is stopped leaves its results."""
    peaks = {}
    for count in threads:
        torch.set_num_threads(count)
        peaks[count] = limits.peak()
    print(report.HEAD)
    results: list[Result] = []
    for shape in shapes(quick):
        for m in (3,) if quick else CLIENTS:
            for dtype in DTYPES:
                wanted = tuple(op for op in chosen if dtype == DTYPES[0] or op not in ON_GRAM)
                results += _problem(shape, m, dtype, device, limits, peaks, wanted, 0.005 if quick else BUDGET)
                save(_rates(peaks, results), results)
    return results


def _rates(peaks: dict[int, float], results: list[Result]) -> Rates:
    rates = []
    for count, peak in peaks.items():
        largest = max((r for r in results if r.threads == count), key=lambda r: r.row_bytes, default=None)
        if largest is not None:
            rates.append({"threads": count, "bandwidth": largest.row_bytes / largest.timing.read.median, "peak": peak})
    return rates


def _problem(
    shape: Shape,
    m: int,
    dtype: torch.dtype,
    device: torch.device,
    limits: Limits,
    peaks: dict[int, float],
    chosen: tuple[str, ...],
    budget: float,
) -> list[Result]:
    problem = Problem(shape, m, dtype, device, SEED)
    implementations = ops.backend()
    results = []
    for threads, peak in peaks.items():
        torch.set_num_threads(threads)
        for case in problem.cases(chosen):
            rows = _read_for(case.op, problem)
            plain = by_hand(case.op, problem, torch.float32)
            exact = None if case.op in IN_FLOAT64 else by_hand(case.op, problem, torch.float64)
            timing = measure(case.run, limits.read_once(rows), plain, exact, device, budget)
            name = "float64" if case.op in ON_GRAM else str(dtype).removeprefix("torch.")
            row_bytes = rows.numel() * rows.element_size()
            implementation = implementations[case.op].implementation
            result = Result(
                case.op, shape.name, shape.columns, shape.layers, m, name, threads, implementation, case.bytes,
                case.flops, row_bytes, peak, timing,
            )  # fmt: skip
            results.append(result)
            print(report.line(result), flush=True)
    return results


def _read_for(op: str, problem: Problem) -> Tensor:
    """What the loop that only reads goes over, beside this op."""
    if op in ON_GRAM:
        return problem.gram
    return problem.rows[:TRACKED] if op == "puc_track" else problem.rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="one tiny shape, a few seconds: tries the program only")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="folder for the results")
    parser.add_argument("--fresh-memory", action="store_true", help="every output in memory fresh from the system")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, by commas; on a GPU 1")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS, metavar="OP", help=", ".join(OPS))
    arguments = parser.parse_args()
    threads = sorted({int(count) for count in arguments.threads.split(",")})
    if threads[0] < 1:
        parser.error(f"--threads must be at least 1, found {threads[0]}")
    device = torch.device(arguments.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: no GPU is available")
        threads = [1]
    if ops.backend()["layer_gram"].implementation == "torch":
        warnings.warn(f"nothing to compare: {ops.backend()['layer_gram'].reason}", stacklevel=1)
    supply = "as the C library has it" if arguments.fresh_memory else keep_freed_memory()
    limits = Limits(device)
    facts = report.environment(device, SEED, threads, limits.how)
    facts |= {"memory": supply, "time": "the processor's with one thread, else the clock's or the GPU's"}
    name = f"kernels-{device.type}{'-quick' * arguments.quick}"

    def save(rates: Rates, results: list[Result]) -> None:
        report.write(arguments.out, name, facts, rates, results)

    print("\n" + report.summary(run(limits, device, threads, tuple(arguments.ops), arguments.quick, save)))


if __name__ == "__main__":
    main()
