# SPDX-License-Identifier: Apache-2.0
"""The whole FedLF step on a GPU: against 0.6 ms, against reading the rows twice, and how often it waits for the device.

    python -m benchmarks.device_step [--device cuda|cpu] [--quick] [--out DIR]

A step is all of ``aggregate``, from an idle device until it is idle again, on the wall clock. Its parts are timed by
the device alone. ``--device cpu`` tries the program; benchmarks.server_step measures that.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks._gpu.facts import facts
from benchmarks._kernels import report
from benchmarks._kernels.limits import Limits
from benchmarks._kernels.problems import BOUNDS, Shape, shapes
from benchmarks._kernels.timing import Spread, seconds
from fl_lightning import ops
from fl_lightning.algorithms import FedLF
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.updates import UpdateMatrix

SEED, REPEATS = 0, 31
TARGET = 0.6e-3  # seconds, for ten clients in float32 on an H100 or H200


@dataclass(frozen=True)
class StepTimes:
    """Times of one step, in seconds.

    Attributes:
        rows: clients.
        dtype: of their rows.
        step: the whole step, from idle to idle.
        gram: ``layer_gram``.
        solve: ``common_descent`` of one matrix per layer, with a fair row.
        combine: ``layer_combine``.
        read: reading the rows once.
        waits: operations that waited for the device, beside the one event behind which a step's numbers have arrived;
            ``None`` on the CPU.
    """

    rows: int
    dtype: str
    step: Spread
    gram: Spread
    solve: Spread
    combine: Spread
    read: Spread
    waits: int | None

    def markdown(self) -> str:
        """One line of the table."""
        parts = (self.step, self.gram, self.solve, self.combine, self.read)
        times = " | ".join(f"{1e3 * s.median:.3f} ({1e3 * s.low:.3f} to {1e3 * s.high:.3f})" for s in parts)
        ratio = self.step.median / 2 / self.read.median
        return f"| {self.rows} | {self.dtype} | {times} | {ratio:.2f} | {'' if self.waits is None else self.waits} |"


HEAD = (
    "| clients | rows | step, ms | layer_gram | common_descent | layer_combine | reading once | step by reading twice "
    "| waits |\n|---|---|---|---|---|---|---|---|---|"
)


def step_times(shape: Shape, m: int, dtype: torch.dtype, device: torch.device, repeats: int) -> StepTimes:
    """Times the steps of rounds with random updates that share a direction, and no history."""
    layout = ParamLayout.from_sizes([b - a for a, b in pairwise(shape.offsets.tolist())])
    generator = torch.Generator(device).manual_seed(SEED)
    rows = torch.randn(m, layout.numel, generator=generator, device=device)
    rows += 0.5 * torch.randn(layout.numel, generator=generator, device=device)
    rows, rule = rows.to(dtype), FedLF(layers="tensor", history_window="none")
    params, losses, sizes = torch.zeros_like(rows[0]), torch.linspace(0.5, 1.5, m), torch.full((m,), 600.0)

    def cohort() -> Cohort:
        return Cohort(params, UpdateMatrix(rows, layout), losses, sizes, tuple(range(m)), 0, 0.1)

    waits = None if device.type == "cpu" else _waits(lambda: rule.aggregate(cohort()))
    gram = ops.layer_gram(rows, layout.offsets)
    weights = (losses.double() - losses.double().mean()).to(device)
    coeff, read = torch.ones(layout.num_layers, m, device=device), Limits(device).read_once(rows)
    times: dict[str, list[float]] = {name: [] for name in ("step", "gram", "solve", "combine", "read")}
    for repeat in range(repeats + 1):  # the first does not count
        arrived = cohort()
        found = {"step": _from_idle(lambda: rule.aggregate(arrived), device)}  # noqa: B023
        if rule.report.flagged:
            raise RuntimeError("a round was degenerate, which is not what this program measures")
        found["gram"] = seconds(lambda: ops.layer_gram(rows, layout.offsets), device)
        found["solve"] = seconds(lambda: ops.common_descent(gram, m, None, weights, **BOUNDS), device)
        found["combine"] = seconds(lambda: ops.layer_combine(rows, layout.offsets, coeff), device)
        found["read"] = read()
        for name in found if repeat else ():
            times[name].append(found[name])
    spreads = {name: Spread.of(values) for name, values in times.items()}
    return StepTimes(m, str(dtype).removeprefix("torch."), waits=waits, **spreads)


def _from_idle(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _waits(call: Callable[[], object]) -> int:
    """How many operations of a call made the CPU wait for the GPU."""
    call()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in seen)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, a few seconds: tries the program only")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="folder for the results")
    arguments = parser.parse_args()
    device, shape = torch.device(arguments.device), shapes(arguments.quick)[-1]
    environment = report.environment(device, SEED, [torch.get_num_threads()], Limits(device).how) | facts(device)
    environment |= {
        "shape": f'{shape.name}: {shape.columns} parameters, {shape.layers} layers (FedLF(layers="tensor"))'
    }
    found = [
        step_times(shape, m, dtype, device, 3 if arguments.quick else REPEATS)
        for m in (10, 40)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    first = found[0]
    seen, target = f"{1e3 * first.step.median:.3f} ms", f"target {1e3 * TARGET:g} ms on an H100 or H200"
    verdict = f"m = {first.rows}, {first.dtype}: {seen}, {target}"
    lines = [*(f"- {name}: {value}" for name, value in environment.items()), "", HEAD, *(t.markdown() for t in found)]
    print("\n".join([*lines, "", verdict]))
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"device-step-{arguments.device}" + "-quick" * arguments.quick
    text = "\n".join(["# The FedLF step on a device", "", *lines, "", verdict, ""])
    (arguments.out / f"{name}.md").write_text(text, "utf-8")
    results = {"environment": environment, "results": [asdict(times) for times in found]}
    (arguments.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
