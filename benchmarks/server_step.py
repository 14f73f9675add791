# SPDX-License-Identifier: Apache-2.0
"""The whole server step of FedLF against reading the rows twice, the vector form, and other QP solvers.

    python -m benchmarks.server_step [--quick] [--parts step history qp] [--threads 1,2] [--out DIR]

All sides take turns in one process, and the limits are measured beside them. Prints Markdown; writes Markdown and
JSON for each part.
Other solvers (pip install cvxopt quadprog clarabel proxsuite) are used where they are installed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from benchmarks._kernels import report
from benchmarks._kernels.limits import Limits
from benchmarks._kernels.memory import keep_freed_memory
from benchmarks._kernels.problems import Shape, shapes
from benchmarks._kernels.timing import Spread
from benchmarks._server_step.oracles import Oracle, installed, matrices, relative_gap
from benchmarks._server_step.rounds import Products, Server, vector_form
from fl_lightning import ops

PARTS = ("step", "history", "qp")
SEED, BATCH, REMEMBERED = 0, 62, 59
REPEATS = 9
VECTOR_REPEATS = {10: 3, 40: 1}  # the vector form takes seconds
# What is asked of min_norm: k, of full rank, and by how much it beats cvxopt and the best of the others.
QPS = (
    (11, True, 50.0, 2.0),
    (41, True, 25.0, 2.0),
    (101, True, 9.0, 2.0),
    (41, False, None, 4.0),
    (101, False, None, 4.0),
)


@dataclass(frozen=True)
class Line:
    """One figure against its target.

    Attributes:
        what: in words.
        seen: the ratio of medians, or the largest gap.
        target: what it is to be; ``None``: nothing was asked for.
        most: whether the target is the most it may be, or the least.
        times: median and quartiles behind it, in seconds, by name.
    """

    what: str
    seen: float
    target: float | None
    most: bool
    times: dict[str, Spread]

    @property
    def met(self) -> bool:
        """Whether the target is reached; true where there is none."""
        if self.target is None:
            return True
        return self.seen <= self.target if self.most else self.seen >= self.target

    def markdown(self) -> str:
        """One line of the table."""
        times = ", ".join(
            f"{name} {_time(s.median)} ({_time(s.low)} to {_time(s.high)}, {s.count})" for name, s in self.times.items()
        )
        sign = "at most" if self.most else "at least"
        target, met = ("", "") if self.target is None else (f"{sign} {self.target:g}", "yes" if self.met else "no")
        return f"| {self.what} | {self.seen:.3g} | {target} | {met} | {times} |"


HEAD = "| what | seen | target | met | median (quartiles, repeats) |\n|---|---|---|---|---|"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds > 1e-3 else f"{1e6 * seconds:.4g} us"


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def step_lines(shape: Shape, m: int, threads: list[int], limits: Limits, oracles: list[Oracle]) -> list[Line]:
    """FedLF without history against reading the matrix twice, and against the vector form."""
    server, lines = Server(shape, m, m, SEED), []
    cvxopt = next((oracle for oracle in oracles if oracle.name == "cvxopt"), None)
    for count in threads:
        torch.set_num_threads(count)
        read, steps, reads, vectors = limits.read_once(server.rows), [], [], []
        server.rule.aggregate(server.cohort())
        for repeat in range(REPEATS):
            cohort = server.cohort()
            steps.append(_timed(lambda: server.rule.aggregate(cohort)))  # noqa: B023
            reads.append(read())
            if cvxopt is not None and repeat < VECTOR_REPEATS.get(m, 2):
                cohort = server.cohort()
                vectors.append(_timed(lambda: vector_form(cohort, cvxopt)))  # noqa: B023
                if repeat > 0:
                    continue
                got, want = server.rule.aggregate(cohort), vector_form(cohort, cvxopt)
                error = float((got - want).norm() / want.norm())
                if error > 1e-2:
                    raise RuntimeError(f"the step and its vector form differ by {error:.1e}")
        step, one = Spread.of(steps), Spread.of(reads)
        name, times = f"FedLF step, m = {m}, {count} thread(s)", {"step": step, "read": one}
        if m == 10:
            lines.append(Line(f"{name}: x reading twice", step.median / 2 / one.median, 1.8, True, times))
        if vectors:
            form = Spread.of(vectors)
            target, times = 15.0 if m == 10 else None, {"step": step, "vector form": form}
            lines.append(Line(f"{name}: vector form by step", form.median / step.median, target, False, times))
    return lines


def history_lines(
    shape: Shape, m: int, threads: list[int], limits: Limits, fair_row: Literal["cos", "none"]
) -> list[Line]:
    """FedLF with remembered rows against reading new and remembered rows twice; refuses products among old rows."""
    server = Server(shape, m, m + REMEMBERED, SEED, fair_row)
    everything = torch.cat([server.rule.history.state_dict()["rows"][:REMEMBERED], server.rows])
    lines = []
    for count in threads:
        torch.set_num_threads(count)
        read, steps, reads = limits.read_once(everything), [], []
        cohort = server.cohort()
        with Products() as products:
            server.rule.aggregate(cohort)
        if {rows for _, rows, _ in products.seen} != {m} or len(products.seen) != 2:
            raise RuntimeError(f"only the new rows' products may be computed, found {products.seen}")
        for _ in range(REPEATS):
            cohort = server.cohort()
            steps.append(_timed(lambda: server.rule.aggregate(cohort)))  # noqa: B023
            reads.append(read())
        if server.rule.report.scalars["history_rows"] != REMEMBERED:
            raise RuntimeError(f"{REMEMBERED} rows must be remembered, found {server.rule.report.scalars}")
        step, one = Spread.of(steps), Spread.of(reads)
        kind = "" if fair_row == "cos" else ", no fair row, so that all rows take part"
        what = f"FedLF step, m = {m}, h = {REMEMBERED}{kind}, {count} thread(s): x reading {m + REMEMBERED} rows twice"
        lines.append(Line(what, step.median / 2 / one.median, 2.2, True, {"step": step, "read": one}))
    return lines


def qp_lines(batch: int, repeats: int, oracles: list[Oracle]) -> list[Line]:
    """``min_norm`` on one thread against the other solvers, called one by one."""
    torch.set_num_threads(1)
    lines = []
    for k, full, of_cvxopt, of_best in QPS:
        grams = matrices(k, k if full else k // 2 + 1, batch, SEED)
        tensor = torch.from_numpy(grams)
        prepared = {oracle.name: [oracle.prepare(gram) for gram in grams] for oracle in oracles}
        times: dict[str, list[float]] = {"min_norm": [], **{name: [] for name in prepared}}
        ops.min_norm(tensor)
        for _ in range(repeats):
            times["min_norm"].append(_timed(lambda: ops.min_norm(tensor)) / batch)  # noqa: B023
            for name, solves in prepared.items():
                times[name].append(_timed(lambda: [solve() for solve in solves]) / batch)  # noqa: B023
        spread = {name: Spread.of(values) for name, values in times.items()}
        own, kind = spread["min_norm"].median, f"min_norm, k = {k}, {'full rank' if full else f'rank {k // 2 + 1}'}"
        if "cvxopt" in spread:
            both = {name: spread[name] for name in ("min_norm", "cvxopt")}
            lines.append(Line(f"{kind}: cvxopt by it", both["cvxopt"].median / own, of_cvxopt, False, both))
        others = {name: s for name, s in spread.items() if name != "cvxopt"}
        if len(others) > 1:
            best = min(s.median for name, s in others.items() if name != "min_norm")
            lines.append(Line(f"{kind}: the best other by it", best / own, of_best, False, others))
        lam, gap = ops.min_norm(tensor)
        worst = max(relative_gap(gram, point) for gram, point in zip(grams, lam.numpy(), strict=True))
        lines.append(Line(f"{kind}: relative KKT gap", max(worst, float(gap.max())), 1e-10, True, {}))
        for name, solves in prepared.items():
            print(f"{name}, {kind}: largest gap {max(map(relative_gap, grams, (s() for s in solves))):.1e}", flush=True)
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, a few seconds: tries the program only")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--threads", default="1,2", help="numbers of threads, by commas")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="folder for the results")
    arguments = parser.parse_args()
    threads = sorted({int(count) for count in arguments.threads.split(",")})
    supply, limits, shape = keep_freed_memory(), Limits(torch.device("cpu")), shapes(arguments.quick)[-1]
    oracles, missing = installed()
    facts = report.environment(torch.device("cpu"), SEED, threads, limits.how) | {
        "memory": supply,
        "shape": f'{shape.name}: {shape.columns} parameters, {shape.layers} layers (FedLF(layers="tensor")), float32',
        "solvers": ", ".join(f"{oracle.name} {metadata.version(oracle.name)}" for oracle in oracles) or "none",
    }
    heading = "\n".join([*(f"- {name}: {value}" for name, value in facts.items()), *missing, "", HEAD])
    print(heading, flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    quick = arguments.quick
    for part in arguments.parts:
        if part == "step":
            lines = [
                line for m in ((10,) if quick else (10, 40)) for line in step_lines(shape, m, threads, limits, oracles)
            ]
        elif part == "history":
            lines = history_lines(shape, 10, threads, limits, "cos") + history_lines(shape, 10, threads, limits, "none")
        else:
            lines = qp_lines(4 if quick else BATCH, 2 if quick else REPEATS, oracles)
        table = "\n".join(line.markdown() for line in lines)
        print(table, flush=True)
        name = f"server-step-{part}" + "-quick" * quick
        text = f"# The server step on {facts['processor']}\n\n{heading}\n{table}\n"
        (arguments.out / f"{name}.md").write_text(text, "utf-8")
        found = {"environment": facts, "results": [asdict(line) | {"met": line.met} for line in lines]}
        (arguments.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
