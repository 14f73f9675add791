# SPDX-License-Identifier: Apache-2.0
"""Each op's device time beside the device's best rates: of copying memory, and of products on tensor cores.

    python -m benchmarks.device_bandwidth [--device cuda|cpu] [--quick] [--clients 3 10 ...] [--only OP] [--out DIR]

ResNet-18's parameters. The device sleeps while the host queues a call, so no time of the host counts. An op's bound is
the time for the bytes that it reads and writes at the rate of a copy of 2 GB, or, of products, for their operations at
the rate of a large product on tensor cores. Copies of few bytes do not reach that rate either. ``puc_track`` reads one
row whatever the number of clients, and is measured once. Results are written after each number of clients. ``--device
cpu`` tries the program. ``--only`` takes one op alone, and names the files after it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks._gpu.facts import add_device, facts
from benchmarks._kernels.problems import ON_GRAM, OPS, Problem, Shape, shapes
from benchmarks._kernels.timing import Spread, seconds
from fl_lightning import ops

CLIENTS = (3, 10, 16, 20, 32, 40, 64, 100)
DTYPES = (torch.float32, torch.bfloat16)
REPEATS, SEED = 21, 0
# At least this share of the bound's speed; products of up to 16 rows read memory and little more.
TARGET = {"layer_combine": 0.85, "layer_dots": 0.85, "layer_squares": 0.85, "puc_combine": 0.85, "puc_track": 0.85}
GRAM_TARGETS = {3: 0.85, 10: 0.85, 16: 0.85, 40: 0.6, 100: 0.45}
TF32_PRODUCTS = 3  # of the kernel, for one of float32


@dataclass(frozen=True)
class Rates:
    """What the device does at best.

    Attributes:
        copy: bytes per second, read and written, of a copy of 2 GB.
        tensor_cores: operations per second of a matrix product of 8192 rows, by dtype of the rows: TF32 for float32.
    """

    copy: float
    tensor_cores: dict[str, float]


@dataclass(frozen=True)
class Line:
    """One op on one problem.

    Attributes:
        rows: clients.
        bytes: each input read once and each output written once.
        bound: the time at the device's best rate, in seconds.
        by: what bounds it: ``"memory"``, ``"tensor cores"`` or, of the small problems on Gram matrices, ``""``.
        target: the least share of that speed that is asked for, if any.
    """

    op: str
    rows: int
    dtype: str
    bytes: int
    time: Spread
    bound: float
    by: str
    target: float | None

    @property
    def share(self) -> float:
        """Of the bound's speed."""
        return self.bound / self.time.median

    def markdown(self) -> str:
        """One line of the table."""
        t, met = self.time, "" if self.target is None else "yes" if self.share >= self.target else "**no**"
        target = "" if self.target is None else f"{self.target:.0%}"
        share = f"{self.share:.0%}" if self.by else ""
        return (
            f"| {self.op} | {self.rows} | {self.dtype} | {self.bytes / 1e6:.4g} | {1e3 * t.median:.4f} "
            f"| {1e3 * t.low:.4f} to {1e3 * t.high:.4f} | {self.bytes / t.median / 1e12:.3f} | {share} | {self.by} "
            f"| {target} | {met} |"
        )


HEAD = (
    "| op | clients | rows | MB | device time, ms | quartiles | TB/s | of the bound | bound by | target "
    "| met |\n" + 11 * "|---" + "|"
)


def rates(device: torch.device, quick: bool) -> Rates:
    """Measures them."""
    source = torch.zeros(1 << 20 if quick else 1 << 29, device=device)
    target, size = torch.empty_like(source), 256 if quick else 8192
    copy = 2 * source.nbytes / _median(lambda: target.copy_(source), device)
    tensor_cores = {}
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        for dtype in DTYPES:
            left = torch.ones(size, size, dtype=dtype, device=device)
            tensor_cores[_name(dtype)] = 2 * size**3 / _median(lambda: left @ left, device)  # noqa: B023
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return Rates(copy, tensor_cores)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _median(call: Callable[[], object], device: torch.device) -> float:
    return Spread.of([seconds(call, device) for _ in range(7)][2:]).median


def measure(
    shape: Shape,
    m: int,
    dtype: torch.dtype,
    device: torch.device,
    best: Rates,
    repeats: int,
    only: str | None = None,
    last: bool = True,
) -> Iterator[Line]:
    """All ops or one, and what stands beside them all: after another op, or with numbers that are not finite.

    ``last`` says whether no further number of clients follows, at which ``puc_track`` would be measured again.
    """
    problem = Problem(shape, m, dtype, device, SEED)
    rows, offsets = problem.rows, shape.offsets
    wanted = tuple(op for op in OPS if (dtype == DTYPES[0] or op not in ON_GRAM) and (last or op != "puc_track"))
    for case in problem.cases((only,) if only in wanted else () if only else wanted):
        products = case.op in ("layer_gram", "layer_cross_gram") and m > 32
        yield _line(case.op, m, dtype, case.bytes, case.flops if products else 0, case.run, device, best, repeats)
    if only:
        return
    size = rows.nbytes + rows[0].nbytes

    def combine_add() -> object:
        return ops.layer_combine(rows, offsets, problem.coeff, total)

    total = torch.zeros(shape.columns, device=device)
    name = "layer_combine, added to float32"
    yield _line(name, m, dtype, rows.nbytes + 2 * total.nbytes, 0, combine_add, device, best, repeats)

    def combine() -> object:
        return ops.layer_combine(rows, offsets, problem.coeff)

    def gram() -> object:
        return ops.layer_gram(rows, offsets)

    yield _line("layer_combine after layer_gram", m, dtype, size, 0, combine, device, best, repeats, before=gram)
    for what, harm in (("one NaN", rows[0, :1]), ("a row of NaN", rows[0])):
        harm.fill_(torch.nan)
        yield _line(f"layer_gram, {what}", m, dtype, rows.nbytes, 0, gram, device, best, repeats)


def _line(
    op: str,
    m: int,
    dtype: torch.dtype,
    size: int,
    flops: int,
    call: Callable[[], object],
    device: torch.device,
    best: Rates,
    repeats: int,
    before: Callable[[], object] = lambda: None,
) -> Line:
    times = []
    for _ in range(repeats + 2):  # two do not count
        before()
        times.append(seconds(call, device))
    work = flops * (TF32_PRODUCTS if dtype == torch.float32 else 1) / best.tensor_cores[_name(dtype)]
    bound, by = max((size / best.copy, "memory"), (work, "tensor cores"))
    target = GRAM_TARGETS.get(m) if op == "layer_gram" and (m <= 16 or dtype == torch.float32) else TARGET.get(op)
    by = "" if op in ON_GRAM else by
    return Line(op, m, _name(dtype), size, Spread.of(times[2:]), bound, by, target)


def worst(lines: list[Line], count: int = 2) -> list[Line]:
    """Of the ops that read rows, those that are the farthest from their bounds; one line per op."""
    plain = [line for line in lines if line.op in OPS and line.by]
    by_op = {op: min((x for x in plain if x.op == op), key=lambda x: x.share) for op in {x.op for x in plain}}
    return sorted(by_op.values(), key=lambda x: x.share)[:count]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, a few seconds: tries the program only")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="numbers of rows")
    parser.add_argument("--only", choices=OPS, help="one op")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="folder for the results")
    arguments = parser.parse_args()
    device, shape = torch.device(arguments.device), shapes(arguments.quick)[-1]
    best, repeats = rates(device, arguments.quick), 1 if arguments.quick else REPEATS
    environment = facts(device) | {
        "shape": f"{shape.name}: {shape.columns} parameters, {shape.layers} layers",
        "copy": f"{best.copy / 1e12:.3f} TB/s, read and written",
        "tensor cores": ", ".join(f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in best.tensor_cores.items()),
    }
    head = ["# Ops on a device", "", *(f"- {name}: {value}" for name, value in environment.items()), "", HEAD]
    print("\n".join(head), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    own = f"-{arguments.only}" * bool(arguments.only)
    file = arguments.out / f"device-bandwidth{own}-{arguments.device}{'-quick' * arguments.quick}"
    lines: list[Line] = []
    for m in arguments.clients:
        for dtype in DTYPES:
            last = m == arguments.clients[-1]
            for line in measure(shape, m, dtype, device, best, repeats, arguments.only, last):
                lines.append(line)
                print(line.markdown(), flush=True)
        file.with_suffix(".md").write_text("\n".join([*head, *(line.markdown() for line in lines), ""]), "utf-8")
        written = {
            "environment": environment,
            "results": [asdict(line) | {"share": line.share} for line in lines],
            "worst": [[line.op, line.rows, line.dtype] for line in worst(lines)],
        }
        file.with_suffix(".json").write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    aims = [line for line in lines if line.target is not None]
    print(f"{sum(line.share >= line.target for line in aims if line.target)} of {len(aims)} targets are met")


if __name__ == "__main__":
    main()
